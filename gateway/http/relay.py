"""Hands an upstream's answer to a client, straight from one transport to the other.

No task wakes for a piece: the upstream connection's ``data_received`` ends in the client transport's ``write``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gateway.http.answers import BODYLESS
from gateway.http.headers import Pair, forwardable
from wire.outcomes import RoostError

if TYPE_CHECKING:
    from gateway.http.exchange import Exchange
    from gateway.http.upstream_response import UpstreamResponse

# (piece, last) -> what is sent in its place. Called in order; exactly once with last=True, at the end.
Transform = Callable[[bytes, bool], bytes]

# A body of a known length up to this is sent at once when it is whole: an engine that dies in the middle of it then
# costs nothing but a retry, and a transform may change its length.
WHOLE_BODY_BYTES = 1 << 20

# The gateway speaks for itself in these.
_OWN_FIELDS = frozenset((b"date", b"server"))


async def relay(
    exchange: Exchange, response: UpstreamResponse, headers: Sequence[Pair], transform: Transform | None
) -> None:
    """Answer ``exchange`` with ``response`` and ``headers``, which win over the response's of the same name.

    A body of known length up to ``WHOLE_BODY_BYTES`` passes whole: ``transform`` sees it once. Any other is streamed as
    it comes, and begins with its first piece that is not empty. While ``exchange.started`` is false after a failure,
    nothing was sent and another upstream may be asked.

    Raises UpstreamFailed and DeadlinePassed as the response does, and what ``transform`` raises. However this ends, the
    response has been used up or aborted.
    """
    own = frozenset(name for name, _ in headers)
    fields = [*forwardable(response.headers, own | _OWN_FIELDS), *headers]
    try:
        if response.status in BODYLESS:
            exchange.respond(response.status, fields, b"")
        elif response.length is not None and response.length <= WHOLE_BODY_BYTES:
            body = response.take() if response.complete else await response.read(WHOLE_BODY_BYTES)
            exchange.respond(response.status, fields, body if transform is None else transform(body, True))
        else:
            await _Stream(exchange, response, fields, transform).run()
    finally:
        response.abort()


class _Stream:
    """Takes pieces from a response and writes them to a client; slows the upstream to the client's pace."""

    def __init__(
        self, exchange: Exchange, response: UpstreamResponse, headers: list[Pair], transform: Transform | None
    ) -> None:
        self._exchange = exchange
        self._response = response
        self._headers = headers
        self._transform = transform
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        exchange = self._exchange
        exchange.flow = self._flow
        try:
            if exchange.writing_paused:
                self._response.pause()
            self._response.attach(self)
            await self._over
        finally:
            exchange.flow = None

    def piece(self, data: bytes, last: bool) -> None:
        if self._over.done():
            return
        try:
            if self._transform is not None:
                data = self._transform(data, last)
            self._send(data, last)
        except Exception as error:  # raised again by run(): this call is the transport's, who has no use for it
            self._over.set_exception(error)

    def failed(self, error: RoostError) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    def _send(self, data: bytes, last: bool) -> None:
        if data or last:
            self._exchange.pass_on(self._response.status, self._headers, data, last)
        if last:
            self._over.set_result(None)

    def _flow(self, paused: bool) -> None:
        if paused:
            self._response.pause()
        else:
            self._response.resume()
