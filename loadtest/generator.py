"""An open-loop HTTP load generator: requests leave at their intended times, and latency counts from those.

A closed loop hides a stall, because it stops asking while it waits; this one does not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeVar, cast

import httptools
import msgspec

T = TypeVar("T")


class Sample(msgspec.Struct, frozen=True):
    """One request. Seconds, on the monotonic clock; ``status`` 0 means that the connection broke.

    ``pieces`` are the times at which pieces of the body came: of a stream of tokens, those of the tokens.
    ``retry_after_s`` is what a refusal said, 0 where it said nothing; ``text`` the body of an answer that is no 200.
    """

    intended: float
    first_byte: float
    done: float
    status: int
    pieces: tuple[float, ...] = ()
    retry_after_s: float = 0.0
    text: str = ""

    @property
    def first_token(self) -> float:
        """When the first piece of the body came."""
        return self.pieces[0] if self.pieces else self.done

    def longest_gap(self, since: float = 0.0, until: float = float("inf")) -> float:
        """The longest time between two pieces, of gaps that end after ``since`` and begin before ``until``."""
        gaps = [after - before for before, after in pairwise(self.pieces) if after > since and before < until]
        return max(gaps, default=0.0)


class Beside(msgspec.Struct, frozen=True):
    """A stream beside some work, which began at ``since`` and was done at ``until``."""

    stream: Sample
    since: float
    until: float

    @property
    def longest_gap_s(self) -> float:
        return self.stream.longest_gap(self.since, self.until)

    @property
    def stalled_s(self) -> float:
        """The seconds of the work's that the stream made no tokens in, going by its rate before."""
        before = [at for at in self.stream.pieces if at <= self.since]
        during = [at for at in self.stream.pieces if self.since < at <= self.until]
        # the first tokens come before the stream has found its pace
        steady = before[len(before) // 4 :]
        if len(steady) < 2:
            raise ValueError("the stream was too short before the work to tell its rate")
        interval = (steady[-1] - steady[0]) / (len(steady) - 1)
        return self.until - self.since - len(during) * interval


class _Connection(asyncio.Protocol):
    """One kept-alive connection with at most one request under way."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[int] | None = None
        self.first_byte = 0.0
        self.closed = False
        self.pieces: list[float] = []
        self.retry_after_s = 0.0
        self.body = b""

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

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self.retry_after_s = float(value)

    def on_body(self, data: bytes) -> None:
        self.pieces.append(time.monotonic())
        self.body = data

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._parser = httptools.HttpResponseParser(self)
        self._settle(status)

    def _settle(self, status: int) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(status)

    async def ask(self, request: bytes) -> int:
        self._waiter = asyncio.get_running_loop().create_future()
        self.first_byte = self.retry_after_s = 0.0
        self.pieces = []
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
        text = "" if status == 200 else connection.body.decode(errors="replace")
        return Sample(
            intended, connection.first_byte or done, done, status, tuple(connection.pieces), connection.retry_after_s,
            text,
        )  # fmt: skip

    async def patient(self, request: bytes, intended: float) -> list[Sample]:
        """Send one request, and again when it is told to come back, until it is answered; every try."""
        tries = [await self.one(request, intended)]
        while tries[-1].status in (429, 503) and tries[-1].retry_after_s:
            await asyncio.sleep(tries[-1].retry_after_s)
            tries.append(await self.one(request, intended))
        return tries

    async def at_once(self, requests: Sequence[bytes]) -> list[Sample]:
        """Send all ``requests`` now; connections are made before."""
        while len(self._idle) < len(requests):
            self._idle.append(await self._connect())
        intended = time.monotonic()
        return list(await asyncio.gather(*(self.one(request, intended) for request in requests)))

    async def beside(self, request: bytes, work: Callable[[], Awaitable[object]], lead_s: float) -> Beside:
        """Stream ``request`` from ``lead_s`` before ``work`` until it is done, then hang up."""
        connection = await self._connect()
        begun = time.monotonic()
        streaming = asyncio.create_task(connection.ask(request))
        await asyncio.sleep(lead_s)
        from_, _ = time.monotonic(), await work()
        until = time.monotonic()
        connection.close()
        await streaming
        sample = Sample(begun, connection.first_byte, until, 200, tuple(connection.pieces))
        if not sample.pieces or sample.pieces[-1] < from_:
            raise RuntimeError(f"the stream ended before it was needed: {connection.body.decode(errors='replace')}")
        return Beside(sample, from_, until)

    async def run(self, requests: Sequence[bytes], rate: float) -> list[Sample]:
        """Send all ``requests`` at ``rate`` a second, each at its intended time whatever the others do."""
        return await self.run_at([(number / rate, request) for number, request in enumerate(requests)])

    async def run_at(self, requests: Iterable[tuple[float, bytes]]) -> list[Sample]:
        """Send each request at its own time, in seconds from the beginning, in order."""
        return await self._at_times(requests, self.one)

    async def run_patiently(self, requests: Iterable[tuple[float, bytes]]) -> list[list[Sample]]:
        """The same, and again what is told to come back; every try of each."""
        return await self._at_times(requests, self.patient)

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

    async def _at_times(
        self, requests: Iterable[tuple[float, bytes]], send: Callable[[bytes, float], Coroutine[Any, Any, T]]
    ) -> list[T]:
        start = time.monotonic() + 0.05
        tasks = []
        for at, request in requests:
            intended = start + at
            delay = intended - time.monotonic()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(send(request, intended)))
        return list(await asyncio.gather(*tasks))

    async def _take(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return await self._connect()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port)
        return connection


def post(target: str, body: bytes, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """A prepared POST request for the generator."""
    lines = [f"POST {target} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
    lines += [f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def completion(model: str, *, prompt: Sequence[int], tokens: int, token: str = "", stream: bool = True) -> bytes:
    """A prepared completion of exactly ``tokens`` tokens, greedy; ``token`` is an engine's own."""
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True,
        "temperature": 0, "stream": stream,
    }  # fmt: skip
    headers = (("authorization", f"Bearer {token}"),) if token else ()
    return post("/v1/completions", msgspec.json.encode(body), headers)
