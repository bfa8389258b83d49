"""Kept-alive connections to upstreams."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Sequence

from gateway.http.headers import Pair
from gateway.http.limits import UpstreamLimits
from gateway.http.upstream_connection import UpstreamConnection
from gateway.http.upstream_response import UpstreamFailed, UpstreamResponse
from wire.outcomes import DeadlinePassed

_log = logging.getLogger(__name__)

# Deadlines and idle connections are looked at this often: a timer a request would cost more than the request's parsing.
SWEEP_S = 0.05

Upstream = tuple[str, int]


class UpstreamPool:
    """Sends requests to upstreams over connections that it keeps and bounds. Make it inside the running loop."""

    def __init__(self, limits: UpstreamLimits | None = None) -> None:
        self._limits = limits or UpstreamLimits()
        self._loop = asyncio.get_running_loop()
        self._idle: defaultdict[Upstream, list[UpstreamConnection]] = defaultdict(list)
        self._connections: set[UpstreamConnection] = set()
        self._open: Counter[Upstream] = Counter()  # those being connected too
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def request(
        self,
        host: str,
        port: int,
        *,
        method: bytes = b"POST",
        target: bytes,
        headers: Sequence[Pair],
        body: bytes,
        deadline: float,
    ) -> UpstreamResponse:
        """Send a request; return when the head of its answer has come. Host and Content-Length are written here.

        ``deadline``, in loop time, holds for the whole answer. A kept-alive connection that turns out to have been
        closed before any byte of an answer is replaced once by a fresh one.

        Raises UpstreamFailed or DeadlinePassed. Cancelled, it closes the connection, and the engine gives up the work.
        """
        key = (host, port)
        fields = b"".join([b"%b: %b\r\n" % pair for pair in headers])
        head = b"%b %b HTTP/1.1\r\nhost: %b:%d\r\n%bcontent-length: %d\r\n\r\n" % (
            method, target, _authority(host), port, fields, len(body),
        )  # fmt: skip
        connection = self._take_idle(key)
        if connection is not None:
            try:
                return await connection.send(head, body, deadline)
            except UpstreamFailed as failure:
                if failure.response_started:
                    raise
        try:
            connection = await self._connect(key, deadline)
        except UpstreamFailed as failure:
            failure.request_sent = connection is not None
            raise
        return await connection.send(head, body, deadline)

    def close(self) -> None:
        """Close every connection; requests in flight fail."""
        self._closed = True
        for connection in list(self._connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    @property
    def connections(self) -> int:
        return len(self._connections)

    # for connections

    def idle(self, connection: UpstreamConnection) -> None:
        """``connection`` has finished a request and can take another."""
        idle = self._idle[connection.key]
        if len(idle) >= self._limits.max_idle or self._closed:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        idle.append(connection)

    def lost(self, connection: UpstreamConnection) -> None:
        """``connection`` is closed."""
        if connection not in self._connections:
            return  # lost while it was being connected: _connect() has seen to it
        key = connection.key
        self._connections.remove(connection)
        self._released(key)
        idle = self._idle.get(key)
        if idle is not None and connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[key]

    def _take_idle(self, key: Upstream) -> UpstreamConnection | None:
        idle = self._idle.get(key)
        while idle:
            connection = idle.pop()  # the last used: the least likely to be closed by now
            if connection.usable:
                return connection
        return None

    async def _connect(self, key: Upstream, deadline: float) -> UpstreamConnection:
        host, port = key
        if self._closed:
            raise UpstreamFailed("the gateway is closing", request_sent=False)
        if self._open[key] >= self._limits.max_connections:
            raise UpstreamFailed(f"more than {self._open[key]} connections to the engine are open", request_sent=False)
        remaining = deadline - self._loop.time()
        self._open[key] += 1
        connected = False
        try:
            async with asyncio.timeout(min(remaining, self._limits.connect_timeout_s)):
                _, connection = await self._loop.create_connection(
                    lambda: UpstreamConnection(self, key, self._limits), host, port
                )
            if not connection.usable:
                raise UpstreamFailed("the engine closed the connection as soon as it was made", request_sent=False)
            connected = True
        except TimeoutError:
            if remaining <= self._limits.connect_timeout_s:
                raise DeadlinePassed("the engine was not connected to before the request's deadline") from None
            raise UpstreamFailed("connecting to the engine took too long", request_sent=False) from None
        except OSError as error:
            # the address is for the log alone: clients are told what this raises
            _log.warning("no connection to %s:%d: %s", host, port, error)
            raise UpstreamFailed("the engine can't be connected to", request_sent=False) from error
        finally:
            if not connected:
                self._released(key)
        self._connections.add(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        return connection

    def _released(self, key: Upstream) -> None:
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in [each for each in self._connections if each.deadline <= now]:
            connection.expire()
        oldest = now - self._limits.idle_s
        for idle in self._idle.values():
            for connection in idle:
                if connection.idle_since > oldest:
                    break
                connection.abort()
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep) if self._connections else None


def _authority(host: str) -> bytes:
    return f"[{host}]".encode() if ":" in host else host.encode()
