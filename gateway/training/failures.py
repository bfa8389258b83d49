"""How failures are told in the training API's terms, and what is not to fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from wire.outcomes import JournalUnavailable, Outcome, RoostError, StorageFull

from .work import Category, Failed

# SDKs repeat 408, 409, 429 and 5xx by themselves: what a client would get again is none of these, but for a reused
# number, which no SDK sends
_STATUS = {Outcome.UNFIT: 400, Outcome.RETIRED: 404, Outcome.VERSION_CONFLICT: 409, Outcome.STORAGE_FULL: 503}

_log = logging.getLogger(__name__)

T = TypeVar("T")

# before what the journal did not take is given to it again
_RETRY_S = 1.0


def status_of(error: RoostError) -> int:
    """The HTTP status for a request that was not taken."""
    return _STATUS.get(error.outcome, error.outcome.http_status)


async def until_written(write: Callable[[], Awaitable[T]]) -> T:
    """What ``write`` returns once the journal takes it. Raises what else ``write`` does."""
    while True:
        try:
            return await write()
        except (JournalUnavailable, StorageFull) as error:
            _log.warning("the journal is written to again in %g s: %s", _RETRY_S, error.message)
            await asyncio.sleep(_RETRY_S)


def failed(error: Exception, what: str) -> Failed:
    """The result of an operation that ended with ``error``. ``what`` says which, for the log."""
    if not isinstance(error, RoostError):
        _log.error("%s failed", what, exc_info=error)
        return Failed(error="the training service failed on this operation", category=Category.SERVER)
    if error.outcome.http_status < 500:
        return Failed(error=error.message, category=Category.USER)
    _log.warning("%s failed: %s", what, error.message)
    told = error.message if error.public else "a part of the service is not available"
    return Failed(error=told, category=Category.SERVER)
