"""An upstream's answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from gateway.http.headers import Headers, Pair
from wire.outcomes import EngineFailed, RoostError

# An upstream is not read further while this much of its answer waits for somebody to take it.
UNTAKEN_BYTES = 1 << 20


class UpstreamFailed(EngineFailed):
    """The upstream could not be reached, or broke off.

    ``request_sent``: it may have got the request. ``response_started``: some byte of an answer came.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        request_sent: bool = True,
        response_started: bool = False,
    ) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s)
        self.request_sent = request_sent
        self.response_started = response_started


class Flow(Protocol):
    """What a response needs of its connection."""

    def set_reading(self, on: bool) -> None: ...

    def abort(self) -> None: ...


class ResponseSink(Protocol):
    """Takes a body as it comes. ``failed`` is the last call if it comes."""

    def piece(self, data: bytes, last: bool) -> None: ...

    def failed(self, error: RoostError) -> None: ...


class UpstreamResponse:
    """Status and fields of an answer, and its body as it comes, de-chunked.

    Read it with ``chunks``, ``read`` or a sink, once. One that is not read to its end must be aborted.
    ``length`` is the Content-Length, if any; ``complete``: the whole body has come.
    """

    __slots__ = (
        "_failure",
        "_flow",
        "_pieces",
        "_sink",
        "_untaken",
        "_waiter",
        "complete",
        "headers",
        "length",
        "status",
    )

    def __init__(self, status: int, pairs: list[Pair], length: int | None, flow: Flow) -> None:
        self.status = status
        self.headers = Headers(pairs)
        self.length = length
        self.complete = False
        self._flow: Flow | None = flow
        self._pieces: list[bytes] = []
        self._untaken = 0
        self._failure: RoostError | None = None
        self._sink: ResponseSink | None = None
        self._waiter: asyncio.Future[None] | None = None

    def abort(self) -> None:
        """Close the connection, so that the engine gives the work up. Does nothing once the answer is complete."""
        flow, self._flow = self._flow, None
        if flow is not None:
            flow.abort()

    def attach(self, sink: ResponseSink) -> None:
        """Send everything to ``sink``, beginning at once with what has come already."""
        self._sink = sink
        if self.complete or self._pieces:
            self.resume()
            sink.piece(self.take(), self.complete)
        elif self._failure is not None:
            sink.failed(self._failure)

    def take(self) -> bytes:
        """What has come and was not taken yet."""
        pieces, self._pieces, self._untaken = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def pause(self) -> None:
        """Stop reading from the upstream until ``resume``."""
        if self._flow is not None:
            self._flow.set_reading(False)

    def resume(self) -> None:
        if self._flow is not None:
            self._flow.set_reading(True)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Pieces as they come. Raises UpstreamFailed or DeadlinePassed, after the pieces that came before."""
        while True:
            if self._pieces:
                self.resume()
                yield self.take()
            elif self.complete:
                return
            elif self._failure is not None:
                raise self._failure
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises UpstreamFailed when it has more than ``limit`` bytes, and as ``chunks`` does."""
        pieces: list[bytes] = []
        size = 0
        async for piece in self.chunks():
            size += len(piece)
            if size > limit:
                self.abort()
                raise UpstreamFailed(f"the engine's answer exceeds {limit} bytes", response_started=True)
            pieces.append(piece)
        return b"".join(pieces)

    # for the connection

    def push(self, data: bytes, last: bool) -> None:
        """``data`` came; ``last``: the body is whole with it."""
        if last:
            self.complete = True
            self._flow = None
        if self._sink is not None:
            self._sink.piece(data, last)
            return
        if data:
            self._pieces.append(data)
            self._untaken += len(data)
            if self._untaken > UNTAKEN_BYTES:
                self.pause()
        self._wake()

    def fail(self, error: RoostError) -> None:
        """Nothing more will come."""
        self._failure = error
        self._flow = None
        if self._sink is not None:
            self._sink.failed(error)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
