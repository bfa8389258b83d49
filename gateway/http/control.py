"""Serves control requests of a connection with aiohttp, one at a time.

aiohttp sees a transport of its own, the lane, and on it requests whose heads were written anew; so nothing of the
connection's framing is read twice. What it writes goes to the client as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Protocol

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from gateway.http.answers import CONTINUE
from gateway.http.limits import HttpLimits
from gateway.http.reader import Message, canonical_head

log = logging.getLogger(__name__)

# aiohttp must never end a lane for being idle: the connection it belongs to has its own time-outs.
_NEVER_S = 1e9


class LaneEnd(Protocol):
    """What a lane needs of its connection."""

    def answer_over(self, *, keep_alive: bool) -> None: ...

    def lane_closed(self) -> None: ...

    def lane_ready(self) -> None: ...


class ControlLane(asyncio.Transport):
    """The transport that aiohttp sees.

    ``reading`` is false while it wants no more of a body; ``begun``: some byte of the current answer was written.
    """

    def __init__(self, protocol: asyncio.Protocol, connection: LaneEnd, transport: asyncio.Transport) -> None:
        super().__init__()
        self.reading = True
        self._protocol = protocol
        self._connection = connection
        self._transport = transport
        self._closing = False
        self._message: Message | None = None
        self._answered = False
        self._body_over = False
        self.begun = False
        protocol.connection_made(self)

    def begin(self, message: Message, *, closing: bool) -> None:
        """Hand a request over: its head, and what has come of its body. Call ``forward`` as more comes."""
        self._message = message
        self._answered = self._body_over = self.begun = False
        self._protocol.data_received(canonical_head(message, closing=closing))
        self.forward()

    def forward(self) -> None:
        """Hand over what has come of the body since."""
        message = self._message
        if message is None or self._body_over:
            return
        self._body_over = message.complete
        piece = message.take()
        if message.chunked:
            if piece:
                self._protocol.data_received(b"%x\r\n%b\r\n" % (len(piece), piece))
            if message.complete:
                self._protocol.data_received(b"0\r\n\r\n")
        elif piece:
            self._protocol.data_received(piece)
        self._end_if_over()

    def answered(self, keep_alive: bool) -> None:
        """aiohttp has written the whole answer."""
        # Without keep-alive aiohttp closes the lane by itself, perhaps after it has waited for the rest of the body.
        self._answered = keep_alive
        self._end_if_over()

    def lost(self, exc: Exception | None) -> None:
        """The client's connection is no more."""
        self._closing = True
        self._protocol.connection_lost(exc)

    def set_writing_paused(self, paused: bool) -> None:
        if paused:
            self._protocol.pause_writing()
        else:
            self._protocol.resume_writing()

    def _end_if_over(self) -> None:
        if self._message is not None and self._body_over and self._answered:
            self._message = None
            self._connection.answer_over(keep_alive=True)

    # asyncio.Transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            self.begun |= data != CONTINUE
            self._transport.write(data)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        if not self._closing:
            self.begun = True
            self._transport.writelines(list_of_data)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._connection.lane_closed()

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        if not self.reading:
            self.reading = True
            self._connection.lane_ready()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


class _AnswerEnds(AbstractAccessLogger):
    """aiohttp calls its access log when an answer has been written: that is how a lane learns of it."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        lane = request.transport
        if isinstance(lane, ControlLane):
            lane.answered(bool(response.keep_alive))


def control_runner(app: web.Application, limits: HttpLimits) -> web.AppRunner:
    """A runner whose server makes protocols for lanes."""
    return web.AppRunner(
        app,
        auto_decompress=False,
        access_log_class=_AnswerEnds,
        access_log=log,
        keepalive_timeout=_NEVER_S,
        max_line_size=limits.max_target_bytes + 64,
        max_field_size=limits.max_head_bytes,
        max_headers=limits.max_headers + 8,
        shutdown_timeout=1.0,
    )
