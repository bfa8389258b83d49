"""What is done to an engine's answer on its way to the client."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from wire.outcomes import EngineFailed, Outcome

from .echo import ModelEcho
from .http import error_body
from .usage import UsageMeter

_EVENT = b"data: "
_ERROR_EVENT = b'data: {"error"'
_END_OF_EVENT = b"\n\n"


class EngineError(msgspec.Struct):
    """The body of an engine's error, as far as we look at it."""

    message: str = ""
    param: object = None
    code: int | str | None = None


class _ErrorBody(msgspec.Struct):
    error: EngineError


class RequestRefused(Exception):
    """The engine finds the request itself at fault. ``status`` is its HTTP status, ``body`` what the client is told."""

    def __init__(self, status: int, document: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.outcome = Outcome.TOO_LARGE if status == 413 else Outcome.INVALID_REQUEST
        self.body = in_our_form(document, self.outcome)


class AnswerFilter:
    """The transform of one answer: its tokens counted where there is a ``meter``, the concrete model's name in, errors
    inside of an event stream noticed. Where the engine answers in a form of its own, ``translate`` gets the whole of it
    first.

    vLLM has answered 200 before the first token; what fails after that comes as an event. Before anything was passed on
    such an event raises (RequestRefused where the request is at fault, else EngineFailed), so that it ends as any
    other failure does; later it is passed on and remembered in ``engine_error``.
    """

    __slots__ = (
        "_adapter", "_begun", "_echo", "_foreign", "_meter", "_mid_event", "_shown", "_translate", "engine_error",
    )  # fmt: skip

    def __init__(
        self,
        adapter: str,
        shown: str,
        meter: UsageMeter | None = None,
        translate: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._meter = meter
        self._translate = translate
        self._foreign = bytearray()
        self._adapter = adapter.encode()
        self._shown = shown.encode()
        self._echo = ModelEcho(adapter, shown) if adapter != shown else None
        self._begun = False
        self._mid_event = False
        self.engine_error = False

    def __call__(self, piece: bytes, last: bool) -> bytes:
        """What is sent in ``piece``'s place; ``last`` marks the end of the body."""
        if self._translate is not None:
            self._foreign += piece
            if not last:
                return b""
            piece = self._translate(bytes(self._foreign))
        if self._meter is not None:
            piece = self._meter.feed(piece, last)
        if _ERROR_EVENT in piece:
            if not self._begun and piece.startswith(_ERROR_EVENT):
                raise self._error_of(piece)
            self.engine_error = True
            piece = _told_in_our_form(rename(piece, self._adapter, self._shown))
        if piece:
            self._begun = True
            if self._meter is not None:
                self._meter.begun = True
            self._mid_event = not piece.endswith(_END_OF_EVENT)
        if self._echo is None:
            return piece
        out = self._echo.feed(piece)
        return out + self._echo.rest() if last else out

    def closing_event(self, error: bytes) -> bytes:
        """The event that ends a broken stream, after what was sent of the one before it."""
        return (_END_OF_EVENT if self._mid_event else b"") + _EVENT + error + _END_OF_EVENT

    def _error_of(self, piece: bytes) -> Exception:
        document = piece.partition(b"\n")[0].removeprefix(_EVENT)
        code = error_code(document)
        if code is not None and is_clients_fault(code):
            return RequestRefused(code, rename(document, self._adapter, self._shown))
        return EngineFailed("the engine failed before its first token")


def in_our_form(document: bytes, outcome: Outcome) -> bytes:
    """An engine's error as errors of the gateway look, its message and its field kept."""
    try:
        error = msgspec.json.decode(document, type=_ErrorBody).error
    except msgspec.DecodeError:
        return error_body(outcome, "the engine refused the request without saying why")
    return error_body(outcome, error.message, error.param if isinstance(error.param, str) else None)


def _told_in_our_form(piece: bytes) -> bytes:
    """``piece`` with the error event in it rewritten, where the whole of that is in it."""
    before, marker, rest = piece.partition(_ERROR_EVENT)
    document, end, after = (marker.removeprefix(_EVENT) + rest).partition(_END_OF_EVENT)
    if not end:
        return piece
    code = error_code(document)
    outcome = Outcome.INVALID_REQUEST if code is not None and is_clients_fault(code) else Outcome.ENGINE_FAILED
    return b"".join((before, _EVENT, in_our_form(document, outcome), end, after))


def error_code(body: bytes) -> int | None:
    """The HTTP status inside of an engine's error body, or None where it has none."""
    try:
        code = msgspec.json.decode(body, type=_ErrorBody).error.code
    except msgspec.DecodeError:
        return None
    if isinstance(code, str):
        return int(code) if code.isascii() and code.isdigit() else None
    return code


def is_clients_fault(status: int) -> bool:
    """Whether an engine's status speaks of the request itself. Others are between us and the engine."""
    return status in (400, 413, 415, 422)


def rename(text: bytes, adapter: bytes, shown: bytes) -> bytes:
    """``text`` with the engine's name of the adapter replaced wherever it stands."""
    return text.replace(adapter, shown) if adapter != shown else text
