"""Bytes of response heads, and error bodies in OpenAI's form."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

import msgspec

from gateway.http.headers import Pair
from wire.outcomes import Outcome, RoostError

# When to come back where nobody could say: what is not there now is mostly being started again.
DEFAULT_RETRY_AFTER_S = 1.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# RFC 9110: answers with these never have a body.
BODYLESS = frozenset((204, 304))

_log = logging.getLogger(__name__)
# what can't be told to clients is logged as often as this, however many ask meanwhile
_LOG_EVERY_S = 10.0
_UNTOLD = "the catalog is not available now"

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_STATUS_LINES[499] = b"HTTP/1.1 499 Client Closed Request\r\n"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was turned away before any handler saw it. ``reason`` is a metric label."""

    status: int
    reason: str
    message: str
    outcome: Outcome = Outcome.INVALID_REQUEST


class _Date:
    """The Date field's line, formatted once a second."""

    def __init__(self) -> None:
        self._second = -1
        self._line = b""

    def line(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = b"date: %b\r\n" % formatdate(second, usegmt=True).encode()
        return self._line


_date = _Date()


def response_head(status: int, headers: Sequence[Pair], framing: bytes) -> bytes:
    """Status line and fields of one answer; ``framing`` holds ready-made lines.

    Raises ValueError when a field holds a line break, which would let its value forge other fields.
    """
    fields = b"".join([b"%b: %b\r\n" % pair for pair in headers])
    if not fields.count(b"\n") == fields.count(b"\r") == len(headers):
        raise ValueError("a response header holds a line break")
    line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
    return b"".join((line, _date.line(), fields, framing, b"\r\n"))


def error_body(outcome: str, message: str, param: str | None = None) -> bytes:
    """An error as OpenAI's clients read it."""
    return msgspec.json.encode({"error": {"message": message, "type": outcome, "param": param, "code": outcome}})


class _Untold:
    """Logs reasons that clients don't get, and repeats none before its time."""

    def __init__(self) -> None:
        self._last = ""
        self._again_at = 0.0

    def log(self, reason: str) -> None:
        now = time.monotonic()
        if reason != self._last or now >= self._again_at:
            self._last, self._again_at = reason, now + _LOG_EVERY_S
            _log.warning("%s: %s", _UNTOLD, reason)


_untold = _Untold()


def told_to_clients(error: RoostError) -> str:
    """The message of ``error``, or a general one in its place where it is not public; the reason is logged then."""
    if error.public:
        return error.message
    _untold.log(error.message)
    return _UNTOLD


def error_answer(error: RoostError, *, operator: bool = False) -> tuple[int, list[Pair], bytes]:
    """Status, fields and body that stand for ``error``. To an ``operator`` the message is told whatever it names."""
    outcome = error.outcome
    message = error.message if operator else told_to_clients(error)
    headers = [(b"content-type", b"application/json"), (b"x-roost-outcome", outcome.value.encode())]
    retry_after_s = error.retry_after_s
    if retry_after_s is None and (outcome.http_status == 503 or outcome is Outcome.ENGINE_FAILED):
        retry_after_s = DEFAULT_RETRY_AFTER_S
    if retry_after_s is not None:
        # Whole seconds, rounded up: a client that comes early would only be turned away again.
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_after_s))))
    return outcome.http_status, headers, error_body(outcome.value, message, error.field)


def refusal_answer(refusal: Refusal) -> tuple[int, list[Pair], bytes]:
    """Status, fields and body that stand for ``refusal``."""
    outcome = refusal.outcome.value
    headers = [(b"content-type", b"application/json"), (b"x-roost-outcome", outcome.encode())]
    if refusal.status == HTTPStatus.TOO_MANY_REQUESTS:
        headers.append((b"retry-after", b"1"))
    return refusal.status, headers, error_body(outcome, refusal.message)
