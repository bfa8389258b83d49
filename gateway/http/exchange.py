"""One data request on a client connection, and the answer to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from gateway.http.answers import BODYLESS, response_head
from gateway.http.headers import Pair
from gateway.http.limits import JOINED_BODY_BYTES
from gateway.http.reader import Message
from gateway.http.relay import Transform, relay
from wire.outcomes import ClientGone

if TYPE_CHECKING:
    from gateway.http.upstream_response import UpstreamResponse

_LAST_CHUNK = b"0\r\n\r\n"


class AnswerEnd(Protocol):
    """What an exchange needs of its connection."""

    writing_paused: bool

    def answer_over(self, *, keep_alive: bool) -> None: ...

    def answer_broken(self, *, flush: bool) -> None: ...

    def keeps_alive(self, message: Message) -> bool: ...


class Exchange:
    """A request that was read whole, and the way to answer it.

    Answer with ``respond``; or with ``start``, ``write``, ``drain``, ``finish``; or with ``relay``. Content-Length,
    Transfer-Encoding, Connection and Date are written here. When the client goes away the handler's task is cancelled
    and ``gone`` resolves; from then on writing does nothing.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_finished",
        "_gone",
        "_keep_alive",
        "_loop",
        "_message",
        "_transport",
        "_writable",
        "answered_at",
        "body",
        "flow",
        "headers",
        "is_gone",
        "method",
        "path",
        "peer",
        "received_at",
        "sent_bytes",
        "started",
        "target",
    )

    def __init__(
        self,
        message: Message,
        connection: AnswerEnd,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        peer: str,
    ) -> None:
        self.method = message.method.decode()
        self.path = message.path.decode()
        self.target = message.target
        self.headers = message.headers
        self.body = message.take()
        self.peer = peer
        self.received_at = loop.time()
        self.answered_at = 0.0
        self.sent_bytes = 0
        self.started = False
        self.is_gone = False
        # Told of back-pressure while a relay is on: called with True when the client falls behind.
        self.flow: Callable[[bool], None] | None = None
        self._message = message
        self._connection = connection
        self._transport = transport
        self._loop = loop
        self._finished = False
        self._chunked = False
        self._keep_alive = False
        self._gone: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None

    @property
    def gone(self) -> asyncio.Future[None]:
        """Done once the client went away before its answer was complete."""
        if self._gone is None:
            self._gone = self._loop.create_future()
            if self.is_gone:
                self._gone.set_result(None)
        return self._gone

    @property
    def finished(self) -> bool:
        """The answer was handed to the transport whole, or given up."""
        return self._finished

    @property
    def writing_paused(self) -> bool:
        """The client takes less than was written to it."""
        return self._connection.writing_paused

    def respond(self, status: int, headers: Sequence[Pair], body: bytes) -> None:
        """Answer at once. The body is left out where the status forbids one."""
        if status in BODYLESS:
            self._send(self._begin(status, headers, b"", delimited=True))
        else:
            head = self._begin(status, headers, b"content-length: %d\r\n" % len(body), delimited=True)
            if len(body) <= JOINED_BODY_BYTES:
                self._send(head + body)
            else:
                self._send(head)
                self._send(body)
        self._over()

    def start(self, status: int, headers: Sequence[Pair]) -> None:
        """Begin a streamed answer: chunked, or delimited by the connection's end for HTTP/1.0."""
        self._send(self._begin_stream(status, headers))

    def write(self, data: bytes) -> None:
        """Send one piece of a streamed answer; an empty one sends nothing."""
        if not self.started or self._finished:
            raise RuntimeError("write() outside a started answer")
        if data:
            self._send(self._framed(data))

    async def drain(self) -> None:
        """Wait until the client has taken enough of what was written. Raises ClientGone."""
        if self.is_gone:
            raise ClientGone("the client went away")
        if self._connection.writing_paused:
            if self._writable is None:
                self._writable = self._loop.create_future()
            await self._writable

    def finish(self) -> None:
        """End a streamed answer."""
        if not self.started or self._finished:
            raise RuntimeError("finish() outside a started answer")
        if self._chunked:
            self._send(_LAST_CHUNK)
        self._over()

    def abort(self) -> None:
        """Give the answer up: the connection is closed, and the client sees that the body is incomplete."""
        if not self._finished:
            self._finished = True
            self._connection.answer_broken(flush=self._chunked or not self.started)

    async def relay(
        self, response: UpstreamResponse, headers: Sequence[Pair] = (), transform: Transform | None = None
    ) -> None:
        """Answer with ``response``: see ``gateway.http.relay.relay``."""
        if self.is_gone:
            response.abort()
            raise ClientGone("the client went away")
        await relay(self, response, headers, transform)

    def pass_on(self, status: int, headers: Sequence[Pair], data: bytes, last: bool) -> None:
        """``start``, ``write`` and ``finish`` as far as they are due, in one write: each write is a system call."""
        parts = [] if self.started else [self._begin_stream(status, headers)]
        if data:
            parts.append(self._framed(data))
        if last and self._chunked:
            parts.append(_LAST_CHUNK)
        self._send(parts[0] if len(parts) == 1 else b"".join(parts))
        if last:
            self._over()

    # for the connection

    @property
    def takes_interim(self) -> bool:
        """A 1xx response may be sent now."""
        return not self.started and not self._message.old

    def client_gone(self) -> None:
        """The connection is no more."""
        self.is_gone = True
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        if self._writable is not None and not self._writable.done():
            self._writable.set_exception(ClientGone("the client went away"))

    def set_writing_paused(self, paused: bool) -> None:
        """Back-pressure of the client's transport changed."""
        if self.flow is not None:
            self.flow(paused)
        if not paused and self._writable is not None:
            if not self._writable.done():
                self._writable.set_result(None)
            self._writable = None

    def _begin(self, status: int, headers: Sequence[Pair], framing: bytes, *, delimited: bool) -> bytes:
        if self.started or self._finished:
            raise RuntimeError("the answer was begun before")
        keep_alive = delimited and self._connection.keeps_alive(self._message)
        self._keep_alive = keep_alive
        if keep_alive == self._message.old:
            framing += b"connection: keep-alive\r\n" if keep_alive else b"connection: close\r\n"
        head = response_head(status, headers, framing)
        self.started = True
        self.answered_at = self._loop.time()
        return head

    def _begin_stream(self, status: int, headers: Sequence[Pair]) -> bytes:
        if status in BODYLESS:
            raise ValueError(f"an answer with status {status} has no body to stream")
        self._chunked = not self._message.old
        framing = b"transfer-encoding: chunked\r\n" if self._chunked else b""
        return self._begin(status, headers, framing, delimited=self._chunked)

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _send(self, data: bytes) -> None:
        if not self.is_gone:
            self.sent_bytes += len(data)
            self._transport.write(data)

    def _over(self) -> None:
        if not self._finished:
            self._finished = True
            self._connection.answer_over(keep_alive=self._keep_alive)
