"""What the SDK raises, in Roost's terms: whose fault it is decides what to do about it."""

from __future__ import annotations

import tinker

from wire.outcomes import (
    EngineFailed,
    Forbidden,
    InvalidRequest,
    NotFound,
    RoostError,
    Unauthenticated,
    VersionConflict,
)

_KINDS: dict[int, type[RoostError]] = {401: Unauthenticated, 403: Forbidden, 404: NotFound, 409: VersionConflict}
# what the SDK asks for again by itself, and gave up on
_LATER = {408, 429}


def failure_of(error: tinker.TinkerError) -> RoostError:
    """The caller's own mistake as what it is; else EngineFailed, after which a recipe may be gone on with."""
    # the SDK goes on about itself
    told = str(error).partition(" for self.request_id=")[0]
    if isinstance(error, tinker.RequestFailedError) and error.category == "user":
        return InvalidRequest(told)
    if isinstance(error, tinker.APIStatusError) and 400 <= error.status_code < 500 and error.status_code not in _LATER:
        return _KINDS.get(error.status_code, InvalidRequest)(_said(error))
    return EngineFailed(f"{told}; the same command goes on from the last checkpoint")


def _said(error: tinker.APIStatusError) -> str:
    body = error.body
    told = body.get("error") if isinstance(body, dict) else None
    return told if isinstance(told, str) else error.message
