"""An open-loop HTTP load generator: requests leave at their intended times, and latency counts from those.

A closed loop hides a stall, because it stops asking while it waits; this one does not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import cast

import httptools
import msgspec


class Sample(msgspec.Struct, frozen=True):
    """One request. Seconds, on the monotonic clock; ``status`` 0 means that the connection broke."""

    intended: float
    first_byte: float
    done: float
    status: int


class _Connection(asyncio.Protocol):
    """One kept-alive connection with at most one request under way."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[int] | None = None
        self.first_byte = 0.0
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.Transport, but can do the same
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._settle(0)

    def data_received(self, data: bytes) -> None:
        if not self.first_byte:
            self.first_byte = time.monotonic()
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._parser = httptools.HttpResponseParser(self)
        self._settle(status)

    def _settle(self, status: int) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(status)

    async def ask(self, request: bytes) -> int:
        self._waiter = asyncio.get_running_loop().create_future()
        self.first_byte = 0.0
        self._transport.write(request)
        return await self._waiter

    def close(self) -> None:
        self._transport.close()


class Generator:
    """Sends prepared requests to one address over a pool of connections that grows as the load needs."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[_Connection] = []

    async def one(self, request: bytes, intended: float) -> Sample:
        """Send one request now and wait for its whole answer."""
        connection = await self._take()
        status = await connection.ask(request)
        done = time.monotonic()
        if connection.closed:
            status = status if status else 0
        else:
            self._idle.append(connection)
        return Sample(intended, connection.first_byte or done, done, status)

    async def run(self, requests: Sequence[bytes], rate: float) -> list[Sample]:
        """Send all ``requests`` at ``rate`` a second, each at its intended time whatever the others do."""
        start = time.monotonic() + 0.05
        tasks = []
        for number, request in enumerate(requests):
            intended = start + number / rate
            delay = intended - time.monotonic()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(self.one(request, intended)))
        return list(await asyncio.gather(*tasks))

    async def run_closed(self, requests: Iterable[bytes], concurrency: int) -> list[Sample]:
        """Send all ``requests`` with ``concurrency`` under way at any time: for throughput, not for latency."""
        source = iter(requests)
        samples: list[Sample] = []

        async def worker() -> None:
            samples.extend([await self.one(request, time.monotonic()) for request in source])

        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return samples

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _take(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port)
        return connection


def post(target: str, body: bytes, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """A prepared POST request for the generator."""
    lines = [
        f"POST {target} HTTP/1.1",
        "host: 127.0.0.1",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
