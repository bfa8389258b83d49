"""How failures are told in the training API's terms."""

from __future__ import annotations

import logging

from wire.outcomes import Outcome, RoostError

from .work import Category, Failed

# SDKs repeat 408, 409, 429 and 5xx by themselves: what a client would get again is none of these, but for a reused
# number, which no SDK sends
_STATUS = {Outcome.UNFIT: 400, Outcome.RETIRED: 404, Outcome.VERSION_CONFLICT: 409, Outcome.STORAGE_FULL: 503}

_log = logging.getLogger(__name__)


def status_of(error: RoostError) -> int:
    """The HTTP status for a request that was not taken."""
    return _STATUS.get(error.outcome, error.outcome.http_status)


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
