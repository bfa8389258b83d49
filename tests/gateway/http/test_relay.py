"""From an engine's answer to the client, both sides on raw sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.http import Exchange, Transform, UpstreamFailed, UpstreamPool
from gateway.http.relay import WHOLE_BODY_BYTES
from tests.gateway.http.conftest import Connect, FrontFactory
from tests.gateway.http.raw import RawUpstream, Script, UpstreamSide, chat, until
from wire.outcomes import DeadlinePassed, RoostError

StartUpstream = Callable[[Script], Awaitable[RawUpstream]]

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Gateway:
    """The handler under test: it relays, and notes how that ended."""

    def __init__(self, pool: UpstreamPool, port: int, transform: Transform | None = None) -> None:
        self.errors: list[BaseException] = []
        self.started_at_error: list[bool] = []
        self.within_s = 10.0
        self._pool = pool
        self._port = port
        self._transform = transform

    async def __call__(self, exchange: Exchange) -> None:
        deadline = asyncio.get_running_loop().time() + self.within_s
        try:
            response = await self._pool.request(
                "127.0.0.1", self._port, target=b"/x", headers=[], body=exchange.body, deadline=deadline
            )
            await exchange.relay(response, [(b"x-roost-node", b"n1")], self._transform)
        except BaseException as error:
            self.errors.append(error)
            self.started_at_error.append(exchange.started)
            if exchange.started or not isinstance(error, RoostError):
                raise
            exchange.respond(error.outcome.http_status, [], b"not started")


def whole(body: bytes, extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 201 Created\r\ncontent-length: %d\r\n%b\r\n%b" % (len(body), extra, body)


def answering(*parts: bytes) -> Script:
    async def script(side: UpstreamSide) -> None:
        while True:
            await side.request()
            for part in parts:
                side.send(part)
                await asyncio.sleep(0.02)

    return script


def answering_and_closing(raw: bytes) -> Script:
    async def script(side: UpstreamSide) -> None:
        await side.request()
        side.send(raw)
        await side.writer.drain()

    return script


async def test_a_whole_answer(
    front: FrontFactory, connect: Connect, upstream: StartUpstream, pool: UpstreamPool
) -> None:
    extra = (
        b"x-a: b\r\nserver: engine\r\ndate: never\r\nconnection: keep-alive, x-hop\r\nx-hop: 1\r\nX-Roost-Node: z\r\n"
    )
    up = await upstream(answering(whole(b"body", extra)))
    client = await connect(await front(Gateway(pool, up.port)))
    for _ in range(3):
        client.send(chat(b"{}"))
        answer = await client.answer()
        assert (answer.status, answer.body) == (201, b"body")
        assert answer.headers.pop("date") != "never"
        assert answer.headers == {"content-length": "4", "x-a": "b", "x-roost-node": "n1"}
    assert up.accepted == 1


async def test_a_whole_answer_in_pieces_is_transformed_once(
    front: FrontFactory, connect: Connect, upstream: StartUpstream, pool: UpstreamPool
) -> None:
    calls: list[tuple[bytes, bool]] = []

    def transform(piece: bytes, last: bool) -> bytes:
        calls.append((piece, last))
        return piece.replace(b"base", b"tenant/policy@7")

    raw = whole(b'{"model":"base"}')
    up = await upstream(answering(raw[:-20], raw[-20:-8], raw[-8:]))
    client = await connect(await front(Gateway(pool, up.port, transform)))
    client.send(chat(b"{}"))
    answer = await client.answer()
    assert answer.body == b'{"model":"tenant/policy@7"}'
    assert answer.headers["content-length"] == "27"
    assert calls == [(b'{"model":"base"}', True)]


async def test_a_stream(front: FrontFactory, connect: Connect, upstream: StartUpstream, pool: UpstreamPool) -> None:
    step = asyncio.Event()

    async def script(side: UpstreamSide) -> None:
        while True:
            await side.request()
            side.send(CHUNKED)
            for number in range(3):
                side.send(b"4\r\nev%d;\r\n" % number)
                await step.wait()
                step.clear()
            side.send(b"0\r\n\r\n")

    up = await upstream(script)
    client = await connect(await front(Gateway(pool, up.port)))
    for _ in range(2):
        client.send(chat(b"{}"))
        answer = await client.answer(head_only=True)
        assert (answer.headers["content-type"], answer.headers["x-roost-node"]) == ("text/event-stream", "n1")
        for number in range(3):
            assert await client.chunk() == b"ev%d;" % number
            step.set()
        assert await client.chunk() == b""
    assert up.accepted == 1


async def test_a_stream_is_transformed_and_flushed(
    front: FrontFactory, connect: Connect, upstream: StartUpstream, pool: UpstreamPool
) -> None:
    lasts: list[bool] = []
    held = b""

    def by_event(piece: bytes, last: bool) -> bytes:
        nonlocal held
        lasts.append(last)
        done, separator, held = (held + piece).rpartition(b";")
        return (done + separator + (held if last else b"")).upper()

    up = await upstream(answering(CHUNKED + b"3\r\na;b\r\n", b"3\r\nc;d\r\n", b"1\r\ne\r\n0\r\n\r\n"))
    client = await connect(await front(Gateway(pool, up.port, by_event)))
    client.send(chat(b"{}"))
    assert (await client.answer()).chunks == [b"A;", b"BC;", b"DE"]
    assert lasts == [False, False, True]


async def test_a_long_answer_of_known_length_is_streamed(
    front: FrontFactory, connect: Connect, upstream: StartUpstream, pool: UpstreamPool
) -> None:
    body = bytes(range(256)) * (WHOLE_BODY_BYTES // 128)
    up = await upstream(answering(whole(body)))
    client = await connect(await front(Gateway(pool, up.port)))
    client.send(chat(b"{}"))
    answer = await client.answer()
    assert (answer.body == body, answer.headers["transfer-encoding"]) == (True, "chunked")


async def test_http_1_0_clients_get_streams_without_chunks(
    front: FrontFactory, connect: Connect, upstream: StartUpstream, pool: UpstreamPool
) -> None:
    up = await upstream(answering(CHUNKED + b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n"))
    client = await connect(await front(Gateway(pool, up.port)))
    client.send(chat(b"{}", version=b"1.0"))
    assert (await client.answer()).body == b"abcde"


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_answers_without_a_body(
    front: FrontFactory, connect: Connect, upstream: StartUpstream, pool: UpstreamPool, status: bytes
) -> None:
    up = await upstream(answering(b"HTTP/1.1 " + status + b"\r\n\r\n"))
    client = await connect(await front(Gateway(pool, up.port)))
    client.send(chat(b"{}") * 2)
    for _ in range(2):
        answer = await client.answer(head_only=True)
        assert answer.status == int(status[:3])
        assert "transfer-encoding" not in answer.headers


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        CHUNKED,
    ],
)
async def test_an_upstream_that_dies_before_anything_was_sent(
    front: FrontFactory, connect: Connect, upstream: StartUpstream, pool: UpstreamPool, raw: bytes
) -> None:
    up = await upstream(answering_and_closing(raw))
    gateway = Gateway(pool, up.port)
    client = await connect(await front(gateway))
    client.send(chat(b"{}"))
    answer = await client.answer()
    assert (answer.status, answer.body) == (502, b"not started")
    assert gateway.started_at_error == [False]
    assert isinstance(gateway.errors[0], UpstreamFailed)


async def test_an_upstream_that_dies_inside_a_stream(
    front: FrontFactory, connect: Connect, upstream: StartUpstream, pool: UpstreamPool
) -> None:
    up = await upstream(answering_and_closing(CHUNKED + b"3\r\nabc\r\n"))
    gateway = Gateway(pool, up.port)
    client = await connect(await front(gateway))
    client.send(chat(b"{}"))
    await client.answer(head_only=True)
    assert await client.chunk() == b"abc"
    assert await client.closed()
    assert gateway.started_at_error == [True]
    assert isinstance(gateway.errors[0], UpstreamFailed)


@pytest.mark.parametrize("started", [True, False])
async def test_a_deadline_inside_a_stream(
    front: FrontFactory, connect: Connect, upstream: StartUpstream, pool: UpstreamPool, started: bool
) -> None:
    up = await upstream(answering(CHUNKED + (b"3\r\nabc\r\n" if started else b"")))
    gateway = Gateway(pool, up.port)
    gateway.within_s = 0.3
    client = await connect(await front(gateway))
    client.send(chat(b"{}"))
    answer = await client.answer(head_only=True)
    assert answer.status == (200 if started else 504)
    await until(lambda: bool(gateway.errors))
    assert isinstance(gateway.errors[0], DeadlinePassed)
    assert gateway.started_at_error == [started]


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_transform_that_fails_ends_the_relay(
    front: FrontFactory, connect: Connect, upstream: StartUpstream, pool: UpstreamPool, streamed: bool
) -> None:
    def fail(piece: bytes, last: bool) -> bytes:
        raise ValueError("a bug")

    up = await upstream(answering(CHUNKED + b"1\r\na\r\n" if streamed else whole(b"a")))
    gateway = Gateway(pool, up.port, fail)
    client = await connect(await front(gateway))
    client.send(chat(b"{}"))
    assert (await client.answer()).status == 500
    assert [str(error) for error in gateway.errors] == ["a bug"]


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_aborts_the_engines_work(
    front: FrontFactory, connect: Connect, upstream: StartUpstream, pool: UpstreamPool, streaming: bool
) -> None:
    asked, aborted = asyncio.Event(), asyncio.Event()

    async def script(side: UpstreamSide) -> None:
        await side.request()
        asked.set()
        left = asyncio.ensure_future(side.left())
        if streaming:
            side.send(CHUNKED)
            while not left.done():
                side.send(b"1\r\na\r\n")
                await asyncio.sleep(0.01)
        await left
        aborted.set()

    up = await upstream(script)
    gateway = Gateway(pool, up.port)
    client = await connect(await front(gateway))
    client.send(chat(b"{}"))
    await asked.wait()
    if streaming:
        await client.answer(head_only=True)
        await client.chunk()
    client.leave()
    await asyncio.wait_for(aborted.wait(), 3)
    assert isinstance(gateway.errors[0], asyncio.CancelledError)
    await until(lambda: pool.connections == 0)


async def test_a_slow_client_slows_the_upstream(
    front: FrontFactory, connect: Connect, upstream: StartUpstream, pool: UpstreamPool
) -> None:
    total = 60_000_000
    sides: list[UpstreamSide] = []

    async def script(side: UpstreamSide) -> None:
        await side.request()
        sides.append(side)
        side.send(CHUNKED + b"%x\r\n" % total + b"x" * total + b"\r\n0\r\n\r\n")
        await side.left()

    up = await upstream(script)
    client = await connect(await front(Gateway(pool, up.port)))
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.send(chat(b"{}"))
    await until(lambda: bool(sides))
    await asyncio.sleep(0.3)
    assert sides[0].writer.transport.get_write_buffer_size() > total // 2, "the gateway has taken it all in"
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    answer = await client.answer()
    assert len(answer.body) == total


async def test_many_at_once_are_never_mixed_up(
    front: FrontFactory, connect: Connect, upstream: StartUpstream, pool: UpstreamPool
) -> None:
    async def script(side: UpstreamSide) -> None:
        while True:
            _, body = await side.request()
            if body.endswith(b"s"):
                side.send(CHUNKED)
                for byte in body:
                    side.send(b"1\r\n%c\r\n" % byte)
                    await asyncio.sleep(0)
                side.send(b"0\r\n\r\n")
            else:
                side.send(whole(body))

    up = await upstream(script)
    server = await front(Gateway(pool, up.port))

    async def run(number: int) -> None:
        client = await connect(server)
        for turn in range(20):
            body = b"%d-%d-%b" % (number, turn, b"s" if turn % 2 else b"w")
            client.send(chat(body))
            assert (await client.answer()).body == body

    await asyncio.gather(*[run(number) for number in range(20)])
    assert up.accepted <= 20
