"""What an object store's client says becomes what the caller is told.

The client's own text is never passed on: it holds URLs, and with some stores a signature in them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from wire.outcomes import ArtifactUnavailable, RoostError, StorageFull

_STATUS_RE = re.compile(r"status code: ([0-9]{3})")
_CODE_RE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_FULL_CODES = frozenset(
    {"QuotaExceeded", "InsufficientStorage", "StorageFull", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"}
)
_FULL_STATUS = 507
_REFUSED = (401, 403)
_THROTTLED = (429, 503)
_RETRY_THROTTLED_S = 10.0
_RETRY_S = 3.0
_RETRY_FULL_S = 30.0
# what the client asks where the environment holds no key
_NO_CREDENTIALS = ("169.254.169.254", "metadata.google.internal", "/metadata/identity")
_NO_ACCOUNT = "Account must be specified"


@contextlib.contextmanager
def told(doing: str) -> Iterator[None]:
    """Errors of the client inside the block, as ours: ArtifactUnavailable, StorageFull. ``doing`` follows "can't"."""
    try:
        yield
    except RoostError:
        # some of ours are OSErrors too, and say more than this would
        raise
    except FileNotFoundError:
        raise ArtifactUnavailable(f"can't {doing}: the object store has no such object or bucket") from None
    except (BaseError, OSError, ValueError) as error:
        raise _translated(error, doing) from None


def is_answered(error: BaseError) -> bool:
    """Whether the store itself said no, and not a connection that was lost or too slow."""
    return _STATUS_RE.search(str(error)) is not None


def environment_advice(text: str) -> str:
    """What the environment lacks, if that is what the client's ``text`` comes down to."""
    if _NO_ACCOUNT in text:
        return "the environment names no storage account (AZURE_STORAGE_ACCOUNT_NAME)"
    if any(mark in text for mark in _NO_CREDENTIALS):
        return "the environment holds no credentials (AWS_ACCESS_KEY_ID and the like)"
    return ""


def _translated(error: Exception, doing: str) -> RoostError:
    text = str(error)
    status = int(found[1]) if (found := _STATUS_RE.search(text)) else 0
    code = found[1] if (found := _CODE_RE.search(text)) else ""
    answered = f"the object store answered {status} {code}".rstrip()
    advice = environment_advice(text)
    if advice:
        return ArtifactUnavailable(f"can't {doing}: {advice}")
    if code in _FULL_CODES or status == _FULL_STATUS:
        return StorageFull(f"there is no room to {doing}: {answered}", retry_after_s=_RETRY_FULL_S)
    if status in _REFUSED or isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return ArtifactUnavailable(
            f"can't {doing}: the object store refuses our credentials ({status or 403} {code}".rstrip()
            + "): check the environment's keys and what the bucket allows them"
        )
    if status in _THROTTLED:
        return ArtifactUnavailable(f"can't {doing}: {answered}, too busy", retry_after_s=_RETRY_THROTTLED_S)
    if status:
        return ArtifactUnavailable(f"can't {doing}: {answered}", retry_after_s=_RETRY_S if status >= 500 else None)
    if "timed out" in text.lower() or "timeout" in text.lower():
        return ArtifactUnavailable(f"can't {doing}: the object store did not answer in time", retry_after_s=_RETRY_S)
    return ArtifactUnavailable(f"can't {doing}: the connection to the object store failed", retry_after_s=_RETRY_S)
