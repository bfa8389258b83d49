"""The listening socket, and what its connections share."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import cast

from aiohttp import web

from gateway.http.answers import Refusal
from gateway.http.connection import ClientConnection, DataHandler
from gateway.http.control import control_runner
from gateway.http.limits import HttpLimits

# Time-outs of clients are looked at this often, or more often where they are short.
SWEEP_S = 1.0
HANDLER_END_S = 1.0


class Server:
    """Made by ``serve``. ``refused`` counts requests that no handler saw, by reason."""

    def __init__(
        self,
        data_routes: frozenset[tuple[str, str]],
        handler: DataHandler,
        runner: web.AppRunner,
        limits: HttpLimits,
    ) -> None:
        self.data_routes = frozenset((method.encode(), path.encode()) for method, path in data_routes)
        self.handler = handler
        self.limits = limits
        self.closing = False
        self.running: set[asyncio.Task[None]] = set()
        self.refused: Counter[str] = Counter()
        self.port = 0
        self._runner = runner
        self._loop = asyncio.get_running_loop()
        self._listener: asyncio.Server | None = None
        self._connections: set[ClientConnection] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        shortest = min(
            limits.head_timeout_s, limits.body_timeout_s, limits.keep_alive_s, limits.linger_s, limits.stall_s
        )
        self._sweep_s = min(SWEEP_S, shortest / 4)
        self._sweeper = self._loop.call_later(self._sweep_s, self._sweep)

    async def listen(self, host: str, port: int) -> None:
        self._listener = await self._loop.create_server(lambda: ClientConnection(self), host, port, backlog=4096)
        self.port = self._listener.sockets[0].getsockname()[1]

    @property
    def connections(self) -> int:
        """Client connections that are open."""
        return len(self._connections)

    async def close(self, drain_s: float) -> None:
        """Stop accepting, let what is being served end for up to ``drain_s``, cut off the rest, clean the app up."""
        self.closing = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.close_if_idle()
        try:
            async with asyncio.timeout(drain_s):
                await self._empty.wait()
        except TimeoutError:
            for connection in list(self._connections):
                connection.give_up()
            await self._empty.wait()
        await self._end_handlers()
        self._sweeper.cancel()
        await self._runner.cleanup()

    async def _end_handlers(self) -> None:
        """Handlers may still have accounts to write after their last byte, but not for long."""
        if self.running:
            _, late = await asyncio.wait(self.running, timeout=HANDLER_END_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=HANDLER_END_S)

    # for connections

    def joined(self, connection: ClientConnection) -> bool:
        """Count a new connection. False when there are too many: it must be turned away."""
        self._connections.add(connection)
        self._empty.clear()
        return len(self._connections) <= self.limits.max_connections

    def left(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def refusing(self, refusal: Refusal) -> None:
        self.refused[refusal.reason] += 1

    def control_protocol(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        return cast(asyncio.Protocol, server())

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in [each for each in self._connections if each.deadline <= now]:
            connection.expire()
        self._sweeper = self._loop.call_later(self._sweep_s, self._sweep)


async def serve(
    host: str,
    port: int,
    *,
    data_routes: frozenset[tuple[str, str]],
    handler: DataHandler,
    control: web.Application,
    limits: HttpLimits,
) -> Server:
    """Listen on ``host``:``port`` (0: any). ``data_routes``, of (method, path), go to ``handler``, the rest to aiohttp.

    Raises OSError when the address cannot be bound.
    """
    runner = control_runner(control, limits)
    await runner.setup()
    server = Server(data_routes, handler, runner, limits)
    try:
        await server.listen(host, port)
    except OSError:
        await server.close(0)
        raise
    return server
