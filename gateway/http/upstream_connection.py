"""One connection to an upstream: a request goes out in one write, the answer is passed on read by read."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, cast

import httptools

from gateway.http.headers import Pair
from gateway.http.limits import JOINED_BODY_BYTES, UpstreamLimits
from gateway.http.upstream_response import UpstreamFailed, UpstreamResponse
from wire.outcomes import DeadlinePassed, RoostError

_log = logging.getLogger(__name__)

FOREVER = float("inf")


class ConnectionHome(Protocol):
    """Where a connection belongs."""

    def idle(self, connection: UpstreamConnection) -> None: ...

    def lost(self, connection: UpstreamConnection) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """Serves one request at a time. ``deadline`` is that of the request in flight, in loop time.

    After an answer that is complete and leaves the connection usable it goes home to the pool; otherwise it closes.
    """

    def __init__(self, home: ConnectionHome, key: tuple[str, int], limits: UpstreamLimits) -> None:
        self.key = key
        self.deadline = FOREVER
        self.idle_since = 0.0
        self._home = home
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._head: asyncio.Future[UpstreamResponse] | None = None
        self._response: UpstreamResponse | None = None
        self._headers: list[Pair] = []
        self._pieces: list[bytes] = []
        self._head_bytes = 0
        self._answered = False  # some byte of the current answer came
        self._interim = False
        self._framed = False
        self._reusable = False
        self._complete = False
        self._stray = False  # bytes that belong to no request
        self._reading = True
        self._given_up = False

    async def send(self, head: bytes, body: bytes, deadline: float) -> UpstreamResponse:
        """Send a request and wait for its answer's head. Raises UpstreamFailed, DeadlinePassed."""
        transport = self._transport
        assert transport is not None
        assert self._head is None
        self.deadline = deadline
        self._answered = self._complete = self._interim = False
        self._head_bytes = 0
        future: asyncio.Future[UpstreamResponse] = self._loop.create_future()
        self._head = future
        if len(body) <= JOINED_BODY_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        try:
            return await future
        except asyncio.CancelledError:
            # If the head came in the same moment, the connection may be in use for another request already.
            if future.cancelled():
                self.abort()
            elif future.exception() is None:
                future.result().abort()
            raise

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Close without waiting for anything: the upstream sees its client go."""
        self._given_up = True
        if self._transport is not None:
            self._transport.abort()

    def expire(self) -> None:
        """The deadline of the request in flight has passed."""
        self._fail(DeadlinePassed("the engine did not answer before the request's deadline"))

    def set_reading(self, on: bool) -> None:
        """Let the upstream send, or hold it back."""
        if self._transport is None or on == self._reading:
            return
        self._reading = on
        if on:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._head is None and self._response is None:
            self.abort()  # an idle upstream has nothing to say; an answer to no request must not meet the next one
            return
        self._answered = True
        try:
            self._parser.feed_data(data)
            if self._response is None:
                self._bound_head(len(data))
        except httptools.HttpParserUpgrade:
            self._fail(self._failure("the engine switched protocols"))
            return
        except (httptools.HttpParserError, _TooMuch) as error:
            if not self._complete:
                self._deliver()
                self._fail(self._failure(f"the engine's answer is malformed: {error}"))
                return
            self._stray = True
        self._deliver()

    def eof_received(self) -> None:
        """The transport closes itself after this."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._response is not None and not self._framed and exc is None and not self._given_up:
            self._complete = True  # a body without a length ends with its connection
            self._reusable = False
            self._deliver()
        else:
            why = "the engine closed the connection" if exc is None else f"the connection to the engine was lost: {exc}"
            self._fail(self._failure(why))
        self._home.lost(self)

    # httptools' callbacks

    def on_message_begin(self) -> None:
        if self._complete:
            self._stray = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response is None:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, []
        if len(headers) > self._limits.max_headers:
            raise _TooMuch("too many header fields")
        self._interim = status < 200
        if self._interim:
            return
        length = None
        self._framed = status in (204, 304)
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
                self._framed = True
            elif name == b"transfer-encoding":
                self._framed = True
        self._reusable = self._framed and self._parser.should_keep_alive()
        self._response = UpstreamResponse(status, headers, length, self)

    def on_body(self, piece: bytes) -> None:
        if not self._complete:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if not self._interim:
            self._complete = True

    # passing on

    def _bound_head(self, received: int) -> None:
        self._head_bytes += received
        if self._head_bytes > self._limits.max_head_bytes:
            raise _TooMuch("too many bytes of header fields")

    def _deliver(self) -> None:
        response = self._response
        if response is None:
            return
        pieces, complete = self._pieces, self._complete
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces = []
        head, self._head = self._head, None
        if complete:
            self._retire()
        if data or complete:
            response.push(data, complete)
        if head is not None and not head.done():
            head.set_result(response)

    def _retire(self) -> None:
        """The answer is whole: go home, or close."""
        self._response = None
        self.deadline = FOREVER
        self.set_reading(True)
        transport = self._transport
        if transport is None:
            return
        # An upstream that answered before it had read the whole request would read the rest as the next one.
        if self._reusable and not self._stray and transport.get_write_buffer_size() == 0 and not transport.is_closing():
            self._home.idle(self)
        else:
            transport.close()

    def _failure(self, message: str) -> UpstreamFailed:
        host, port = self.key
        # the address is for the log alone: clients are told what this raises
        _log.info("connection to %s:%d: %s", host, port, message)
        return UpstreamFailed(message, response_started=self._answered)

    def _fail(self, error: RoostError) -> None:
        self.deadline = FOREVER
        head, self._head = self._head, None
        response, self._response = self._response, None
        if response is not None:
            response.fail(error)
        if head is not None and not head.done():
            head.set_exception(error)
        self.abort()


class _TooMuch(Exception):
    pass
