"""The upstream side alone: reuse, bounds, failures, deadlines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from gateway.http import UpstreamFailed, UpstreamLimits, UpstreamPool, UpstreamResponse
from tests.gateway.http.raw import RawUpstream, Script, UpstreamSide, reset, until
from wire.outcomes import DeadlinePassed, EngineFailed

StartUpstream = Callable[[Script], Awaitable[RawUpstream]]

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def ask(pool: UpstreamPool, port: int, body: bytes = b"{}", within_s: float = 10) -> Awaitable[UpstreamResponse]:
    deadline = asyncio.get_running_loop().time() + within_s
    return pool.request("127.0.0.1", port, target=b"/v1/x", headers=[(b"x-a", b"b")], body=body, deadline=deadline)


async def answer_all(side: UpstreamSide) -> None:
    while True:
        await side.request()
        side.send(OK)


def answering(raw: bytes) -> Script:
    async def script(side: UpstreamSide) -> None:
        await side.request()
        side.send(raw)
        await side.left()

    return script


def answering_and_closing(raw: bytes) -> Script:
    async def script(side: UpstreamSide) -> None:
        await side.request()
        side.send(raw)

    return script


async def test_sends_a_request_and_keeps_the_connection(upstream: StartUpstream, pool: UpstreamPool) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def script(side: UpstreamSide) -> None:
        while True:
            seen.append(await side.request())
            side.send(OK)

    up = await upstream(script)
    for _ in range(3):
        response = await ask(pool, up.port, b"body")
        assert (response.status, response.length) == (200, 2)
        assert await response.read(10) == b"ok"
        assert response.complete
    head = b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nx-a: b\r\ncontent-length: 4\r\n\r\n" % up.port
    assert seen == [(head, b"body")] * 3
    assert up.accepted == 1


async def test_a_connection_whose_answer_nobody_read_is_reused(upstream: StartUpstream, pool: UpstreamPool) -> None:
    up = await upstream(answer_all)
    for _ in range(3):
        response = await ask(pool, up.port)
        await until(lambda made=response: made.complete)  # type: ignore[misc]
        response.abort()
    assert up.accepted == 1


async def test_requests_at_the_same_time_use_connections_of_their_own(
    upstream: StartUpstream, pool: UpstreamPool
) -> None:
    all_here = asyncio.Barrier(3)

    async def script(side: UpstreamSide) -> None:
        await side.request()
        await all_here.wait()
        side.send(OK)
        await side.left()

    up = await upstream(script)
    await asyncio.wait_for(asyncio.gather(*[ask(pool, up.port) for _ in range(3)]), 5)
    assert up.accepted == 3


async def test_chunks_come_as_they_are_sent(upstream: StartUpstream, pool: UpstreamPool) -> None:
    step = asyncio.Event()

    async def script(side: UpstreamSide) -> None:
        await side.request()
        side.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(3):
            await step.wait()
            step.clear()
            side.send(b"2\r\nc%d\r\n" % number)
        side.send(b"0\r\nx-trailer: y\r\n\r\n")
        await side.left()

    up = await upstream(script)
    response = await ask(pool, up.port)
    assert response.length is None
    step.set()
    pieces = []
    async for piece in response.chunks():
        pieces.append(piece)
        step.set()
    assert pieces == [b"c0", b"c1", b"c2"]
    assert response.headers.get(b"x-trailer") is None


@pytest.mark.parametrize("raw", [b"HTTP/1.1 200 OK\r\n\r\nall of it", b"HTTP/1.0 200 OK\r\n\r\nall of it"])
async def test_a_body_without_a_length_ends_with_the_connection(
    upstream: StartUpstream, pool: UpstreamPool, raw: bytes
) -> None:
    up = await upstream(answering_and_closing(raw))
    response = await ask(pool, up.port)
    assert await response.read(100) == b"all of it"


async def test_interim_answers_are_skipped(upstream: StartUpstream, pool: UpstreamPool) -> None:
    up = await upstream(answering(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK))
    response = await ask(pool, up.port)
    assert (response.status, response.headers.get(b"link")) == (200, None)
    assert await response.read(10) == b"ok"


async def test_bodyless_answers(upstream: StartUpstream, pool: UpstreamPool) -> None:
    up = await upstream(answering(b"HTTP/1.1 204 No Content\r\n\r\n"))
    response = await ask(pool, up.port)
    assert (response.status, response.complete, await response.read(1)) == (204, True, b"")


async def test_nobody_listens(pool: UpstreamPool) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(UpstreamFailed) as caught:
            await ask(pool, taken.getsockname()[1])
    assert isinstance(caught.value, EngineFailed)
    assert (caught.value.request_sent, caught.value.response_started) == (False, False)
    assert pool.connections == 0


async def test_closed_without_an_answer(upstream: StartUpstream, pool: UpstreamPool) -> None:
    up = await upstream(answering_and_closing(b""))
    with pytest.raises(UpstreamFailed) as caught:
        await ask(pool, up.port)
    assert (caught.value.request_sent, caught.value.response_started) == (True, False)
    assert up.accepted == 1, "a fresh connection is not tried again"


@pytest.mark.parametrize("manner", ["close", "reset"])
async def test_a_reused_connection_that_was_being_closed_is_replaced_once(
    upstream: StartUpstream, pool: UpstreamPool, manner: str
) -> None:
    async def script(side: UpstreamSide) -> None:
        await side.request()
        side.send(OK)
        await side.request()
        if side.number == 1:
            if manner == "reset":
                reset(side.writer)
            return
        side.send(OK)

    up = await upstream(script)
    await (await ask(pool, up.port)).read(10)
    assert await (await ask(pool, up.port)).read(10) == b"ok"
    assert up.accepted == 2


async def test_a_reused_connection_that_broke_inside_an_answer_is_not_replaced(
    upstream: StartUpstream, pool: UpstreamPool
) -> None:
    async def script(side: UpstreamSide) -> None:
        await side.request()
        side.send(OK)
        await side.request()
        side.send(b"HTTP/1.1 2")

    up = await upstream(script)
    await (await ask(pool, up.port)).read(10)
    with pytest.raises(UpstreamFailed) as caught:
        await ask(pool, up.port)
    assert caught.value.response_started
    assert up.accepted == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\nzz\r\n",
    ],
)
async def test_dies_inside_the_body(upstream: StartUpstream, pool: UpstreamPool, raw: bytes) -> None:
    up = await upstream(answering_and_closing(raw))
    pieces = (await ask(pool, up.port)).chunks()
    assert await anext(pieces) == b"half"
    with pytest.raises(UpstreamFailed) as caught:
        await anext(pieces)
    assert caught.value.response_started


@pytest.mark.parametrize(
    "raw",
    [
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 300 + b"content-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"a" * 100_000,
    ],
)
async def test_answers_that_are_not_to_be_trusted(upstream: StartUpstream, pool: UpstreamPool, raw: bytes) -> None:
    up = await upstream(answering(raw))
    with pytest.raises(UpstreamFailed):
        await ask(pool, up.port)
    await until(lambda: pool.connections == 0)


async def test_stray_bytes_never_meet_the_next_request(upstream: StartUpstream, pool: UpstreamPool) -> None:
    async def script(side: UpstreamSide) -> None:
        await side.request()
        side.send(OK + (b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged" if side.number == 1 else b""))
        await side.left()

    up = await upstream(script)
    assert await (await ask(pool, up.port)).read(10) == b"ok"
    assert await (await ask(pool, up.port)).read(10) == b"ok"
    assert up.accepted == 2


async def test_an_idle_upstream_that_speaks_is_dropped(upstream: StartUpstream, pool: UpstreamPool) -> None:
    async def script(side: UpstreamSide) -> None:
        await side.request()
        side.send(OK)
        await asyncio.sleep(0.05)
        side.send(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged")
        await side.left()

    up = await upstream(script)
    await (await ask(pool, up.port)).read(10)
    await until(lambda: pool.connections == 0)
    assert await (await ask(pool, up.port)).read(10) == b"ok"


async def test_connection_close_is_honoured(upstream: StartUpstream, pool: UpstreamPool) -> None:
    up = await upstream(answering(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"))
    for _ in range(2):
        assert await (await ask(pool, up.port)).read(10) == b"ok"
    assert up.accepted == 2


async def test_an_answer_before_the_request_was_read_ends_the_connection(
    upstream: StartUpstream, pool: UpstreamPool
) -> None:
    async def script(side: UpstreamSide) -> None:
        await side.reader.readuntil(b"\r\n\r\n")
        side.writer.transport.pause_reading()  # type: ignore[attr-defined]
        side.send(OK)
        await asyncio.sleep(10)

    up = await upstream(script)
    for _ in range(2):
        response = await ask(pool, up.port, b"x" * 20_000_000)
        assert await response.read(10) == b"ok"
    assert up.accepted == 2


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"])
async def test_deadline(upstream: StartUpstream, pool: UpstreamPool, raw: bytes) -> None:
    closed = asyncio.Event()

    async def script(side: UpstreamSide) -> None:
        await side.request()
        side.send(raw)
        await side.left()
        closed.set()

    up = await upstream(script)
    with pytest.raises(DeadlinePassed):
        await (await ask(pool, up.port, within_s=0.2)).read(100)
    await asyncio.wait_for(closed.wait(), 5)


async def test_cancelling_closes_the_connection(upstream: StartUpstream, pool: UpstreamPool) -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def script(side: UpstreamSide) -> None:
        await side.request()
        asked.set()
        await side.left()
        closed.set()

    up = await upstream(script)
    asking = asyncio.ensure_future(ask(pool, up.port))
    await asked.wait()
    asking.cancel()
    await asyncio.wait_for(closed.wait(), 5)
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_abort_closes_the_connection(upstream: StartUpstream, pool: UpstreamPool) -> None:
    closed = asyncio.Event()

    async def script(side: UpstreamSide) -> None:
        await side.request()
        side.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        await side.left()
        closed.set()

    up = await upstream(script)
    (await ask(pool, up.port)).abort()
    await asyncio.wait_for(closed.wait(), 5)


async def test_an_answer_longer_than_wanted(upstream: StartUpstream, pool: UpstreamPool) -> None:
    up = await upstream(answering(OK))
    with pytest.raises(UpstreamFailed, match="exceeds 1 bytes"):
        await (await ask(pool, up.port)).read(1)


async def test_an_answer_that_nobody_takes_is_not_read_on(upstream: StartUpstream, pool: UpstreamPool) -> None:
    total = 50_000_000
    sides: list[UpstreamSide] = []

    async def script(side: UpstreamSide) -> None:
        await side.request()
        sides.append(side)
        side.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total + b"x" * total)
        await side.left()

    up = await upstream(script)
    response = await ask(pool, up.port)
    await asyncio.sleep(0.3)
    assert sides[0].writer.transport.get_write_buffer_size() > total // 2
    size = 0
    async for piece in response.chunks():
        size += len(piece)
    assert size == total


async def test_connections_are_bounded(upstream: StartUpstream) -> None:
    pool = UpstreamPool(UpstreamLimits(max_connections=1))
    up = await upstream(answering(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"))
    response = await ask(pool, up.port)
    with pytest.raises(UpstreamFailed) as caught:
        await ask(pool, up.port)
    assert not caught.value.request_sent
    response.abort()
    await until(lambda: pool.connections == 0)
    await ask(pool, up.port)
    pool.close()


async def test_idle_connections_are_closed(upstream: StartUpstream) -> None:
    pool = UpstreamPool(UpstreamLimits(idle_s=0.1))
    up = await upstream(answer_all)
    await (await ask(pool, up.port)).read(10)
    assert pool.connections == 1
    await until(lambda: pool.connections == 0)
    await (await ask(pool, up.port)).read(10)
    assert up.accepted == 2
    pool.close()


async def test_close_fails_what_is_in_flight(upstream: StartUpstream) -> None:
    pool = UpstreamPool()
    asked = asyncio.Event()

    async def script(side: UpstreamSide) -> None:
        await side.request()
        asked.set()
        await side.left()

    up = await upstream(script)
    asking = asyncio.ensure_future(ask(pool, up.port))
    await asked.wait()
    pool.close()
    with pytest.raises(UpstreamFailed):
        await asking
    with pytest.raises(UpstreamFailed):
        await ask(pool, up.port)


async def test_nagle_is_off(upstream: StartUpstream, pool: UpstreamPool) -> None:
    up = await upstream(answer_all)
    await (await ask(pool, up.port)).read(10)
    (connection,) = pool._connections
    assert connection._transport is not None
    sock = connection._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
