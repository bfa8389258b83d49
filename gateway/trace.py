"""What is remembered of one request while it runs, and how it is accounted at its end."""

from __future__ import annotations

import os
import re

from wire.outcomes import Outcome, RoostError

from .accesslog import AccessRecord
from .quotas import Admission
from .usage import UsageMeter

_REQUEST_ID_RE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
# bytes of a request's body a token, roughly
_BYTES_A_TOKEN = 4
# an engine may have worked for these without a word
_GIVEN_UP = frozenset({Outcome.CLIENT_GONE, Outcome.DEADLINE})


def request_id(sent: bytes | None) -> bytes:
    """The client's own id where it is a sane one, else a random one; never made from content."""
    if sent is not None and _REQUEST_ID_RE.fullmatch(sent) is not None:
        return sent
    return os.urandom(12).hex().encode()


class Trace:
    """One request. Times are the loop's, in seconds; 0.0 means: not yet."""

    __slots__ = (
        "admission",
        "attempts",
        "body_bytes",
        "engine",
        "error",
        "forwarded_at",
        "key_id",
        "meter",
        "model",
        "node",
        "outcome",
        "received_at",
        "request_id",
        "route",
        "status",
        "waited",
        "waited_s",
    )

    def __init__(self, route: str, request_id: bytes, received_at: float) -> None:
        self.route = route
        self.request_id = request_id
        self.received_at = received_at
        self.outcome = Outcome.OK
        self.status = 200
        self.model = ""
        self.key_id = ""
        self.node = ""
        self.engine = ""
        self.attempts = 0
        self.waited = False
        self.waited_s = 0.0
        self.forwarded_at = 0.0
        self.error = ""
        self.admission: Admission | None = None
        self.body_bytes = 0
        self.meter: UsageMeter | None = None

    def settle(self) -> None:
        """Charge the request's tenant, if it has a quota: nothing where no engine was asked, and no tokens where one
        refused or failed before it answered. An answer that was cut off costs its prompt and the events that came at
        least.
        """
        admission, meter = self.admission, self.meter
        if admission is None:
            return
        if not self.forwarded_at:
            admission.withdraw()
        elif self.outcome in _GIVEN_UP or (meter is not None and meter.begun):
            tokens, events = (meter.tokens, meter.events) if meter is not None else (None, 0)
            admission.settle(tokens, least=self.body_bytes / _BYTES_A_TOKEN + events)
        else:
            admission.settle(0.0)

    def fail(self, error: RoostError) -> None:
        """The request ends with ``error``."""
        self.outcome = error.outcome
        self.status = error.outcome.http_status
        self.error = error.message

    def record(self, *, at: float, now: float, answered_at: float, bytes_out: int) -> AccessRecord:
        """The line of the access log. ``at`` in seconds since 1970."""
        return AccessRecord(
            at=round(at, 3),
            request_id=self.request_id.decode(),
            route=self.route,
            outcome=self.outcome.value,
            status=self.status,
            model=self.model,
            key_id=self.key_id,
            node=self.node,
            engine=self.engine,
            waited_ms=_milliseconds(self.waited_s),
            ttft_ms=_milliseconds(answered_at - self.received_at) if answered_at else 0.0,
            total_ms=_milliseconds(now - self.received_at),
            bytes_out=bytes_out,
            attempts=self.attempts,
            tokens=(self.meter.tokens or 0) if self.meter is not None else 0,
            error=self.error,
        )


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
