"""The error taxonomy: every way a request can end, with its HTTP status, and the exceptions that carry it.

An outcome is the HTTP answer, the metric label and the log field alike. Labels are few and fixed, so that a
metric's cardinality does not depend on what clients send.
"""

from __future__ import annotations

import enum
from typing import Any


class Outcome(enum.StrEnum):
    """How a request ended. The value is the metric label."""

    OK = "ok"
    INVALID_REQUEST = "invalid_request"
    TOO_LARGE = "too_large"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    UNFIT = "unfit"
    VERSION_CONFLICT = "version_conflict"
    RETIRED = "retired"
    COLD_LOAD_BOUND = "cold_load_bound"
    QUOTA = "quota"
    CLIENT_GONE = "client_gone"
    ENGINE_FAILED = "engine_failed"
    ARTIFACT_UNAVAILABLE = "artifact_unavailable"
    BASE_NOT_DEPLOYED = "base_not_deployed"
    NO_HEALTHY_NODE = "no_healthy_node"
    JOURNAL_UNAVAILABLE = "journal_unavailable"
    KNOWN_BAD = "known_bad"
    DEADLINE = "deadline"
    STORAGE_FULL = "storage_full"

    @property
    def http_status(self) -> int:
        return _HTTP_STATUS[self]


_HTTP_STATUS = {
    Outcome.OK: 200,
    Outcome.INVALID_REQUEST: 400,
    Outcome.TOO_LARGE: 413,
    Outcome.UNAUTHENTICATED: 401,
    Outcome.FORBIDDEN: 403,
    Outcome.NOT_FOUND: 404,
    Outcome.UNFIT: 409,
    Outcome.VERSION_CONFLICT: 412,
    Outcome.RETIRED: 410,
    Outcome.COLD_LOAD_BOUND: 429,
    Outcome.QUOTA: 429,
    Outcome.CLIENT_GONE: 499,
    Outcome.ENGINE_FAILED: 502,
    Outcome.ARTIFACT_UNAVAILABLE: 502,
    Outcome.BASE_NOT_DEPLOYED: 503,
    Outcome.NO_HEALTHY_NODE: 503,
    Outcome.JOURNAL_UNAVAILABLE: 503,
    Outcome.KNOWN_BAD: 503,
    Outcome.DEADLINE: 504,
    Outcome.STORAGE_FULL: 507,
}


class RoostError(Exception):
    """Root of every error that Roost raises on purpose.

    ``message`` is one clear sentence for a person. ``field`` names the offending input, where there is one.
    ``retry_after_s`` estimates when a retry may succeed. ``public``: the message names nothing of how the fleet is
    built (addresses, paths), and may be told to any client.
    """

    outcome = Outcome.INVALID_REQUEST
    public = True

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.field, self.retry_after_s))


def _rebuild(kind: type[RoostError], message: str, field: str | None, retry_after_s: float | None) -> RoostError:
    return kind(message, field=field, retry_after_s=retry_after_s)


class InvalidRequest(RoostError, ValueError):
    outcome = Outcome.INVALID_REQUEST


class TooLarge(RoostError, ValueError):
    outcome = Outcome.TOO_LARGE


class Unauthenticated(RoostError, PermissionError):
    outcome = Outcome.UNAUTHENTICATED


class Forbidden(RoostError, PermissionError):
    outcome = Outcome.FORBIDDEN


class NotFound(RoostError, LookupError):
    outcome = Outcome.NOT_FOUND


class Unfit(RoostError, ValueError):
    """An adapter that the base (or the engine) cannot run."""

    outcome = Outcome.UNFIT


class VersionConflict(RoostError, RuntimeError):
    outcome = Outcome.VERSION_CONFLICT


class Retired(RoostError, LookupError):
    outcome = Outcome.RETIRED


class ColdLoadBound(RoostError, RuntimeError):
    outcome = Outcome.COLD_LOAD_BOUND


class QuotaExceeded(RoostError, RuntimeError):
    outcome = Outcome.QUOTA


class ClientGone(RoostError, ConnectionError):
    outcome = Outcome.CLIENT_GONE


class EngineFailed(RoostError, RuntimeError):
    outcome = Outcome.ENGINE_FAILED


class ArtifactUnavailable(RoostError, OSError):
    """An artifact's bytes are missing, unreadable or not of their digest."""

    outcome = Outcome.ARTIFACT_UNAVAILABLE


class BaseNotDeployed(RoostError, LookupError):
    outcome = Outcome.BASE_NOT_DEPLOYED


class NoHealthyNode(RoostError, ConnectionError):
    outcome = Outcome.NO_HEALTHY_NODE


class JournalUnavailable(RoostError, ConnectionError):
    outcome = Outcome.JOURNAL_UNAVAILABLE
    public = False


class KnownBad(RoostError, RuntimeError):
    """A revision that failed lately and is not tried again until its back-off has passed."""

    outcome = Outcome.KNOWN_BAD


class DeadlinePassed(RoostError, TimeoutError):
    outcome = Outcome.DEADLINE


class StorageFull(RoostError, OSError):
    outcome = Outcome.STORAGE_FULL


_BY_OUTCOME: dict[Outcome, type[RoostError]] = {
    kind.outcome: kind
    for kind in (
        InvalidRequest, TooLarge, Unauthenticated, Forbidden, NotFound, Unfit, VersionConflict, Retired,
        ColdLoadBound, QuotaExceeded, ClientGone, EngineFailed, ArtifactUnavailable, BaseNotDeployed,
        NoHealthyNode, JournalUnavailable, KnownBad, DeadlinePassed, StorageFull,
    )
}  # fmt: skip


def error_for(
    outcome: Outcome, message: str, *, field: str | None = None, retry_after_s: float | None = None
) -> RoostError:
    """The exception that carries ``outcome``: what a peer refused becomes what the caller raises."""
    return _BY_OUTCOME[outcome](message, field=field, retry_after_s=retry_after_s)
