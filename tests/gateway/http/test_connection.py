"""The front door over raw sockets: turns, bounds and endings of a connection."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gateway.http import Exchange
from tests.gateway.http.conftest import Connect, FrontFactory, echo
from tests.gateway.http.raw import HOST, chat, get, reset, until


async def test_answers_and_keeps_the_connection(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    for body in (b"one", b"two"):
        client.send(chat(body))
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, b"data:" + body)
        assert "connection" not in answer.headers
        assert "date" in answer.headers


async def test_pipelined_requests_are_answered_in_order(front: FrontFactory, connect: Connect) -> None:
    at_once = most = 0

    async def slower_first(exchange: Exchange) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.02 if exchange.body == b"0" else 0)
        at_once -= 1
        await echo(exchange)

    client = await connect(await front(slower_first))
    client.send(b"".join(chat(b"%d" % number) + get(b"/status?%d" % number) for number in range(20)))
    for number in range(20):
        assert (await client.answer()).body == b"data:%d" % number
        assert (await client.answer()).body == b"control:%d" % number
    assert most == 1


async def test_what_a_client_sends_ahead_is_bounded(front: FrontFactory, connect: Connect) -> None:
    go = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await go.wait()
        await echo(exchange)

    client = await connect(await front(wait))
    body = b"x" * 1000
    count = 20_000  # 21 MB, more than the sockets' own buffers hold
    client.send(chat(body) * count)
    await asyncio.sleep(0.3)
    assert client.writer.transport.get_write_buffer_size() > 5_000_000, "the server has read it all"
    go.set()
    for _ in range(count):
        assert (await client.answer()).body == b"data:" + body


async def test_a_pipelining_client_that_reads_nothing_is_not_served_on(front: FrontFactory, connect: Connect) -> None:
    served = 0

    async def large(exchange: Exchange) -> None:
        nonlocal served
        served += 1
        exchange.respond(200, [], b"x" * 1_000_000)

    client = await connect(await front(large))
    client.reader._limit = 1024  # type: ignore[attr-defined]
    client.send(chat(b"") * 200)
    await asyncio.sleep(0.5)
    assert served < 50
    for _ in range(200):
        assert len((await client.answer()).body) == 1_000_000
    assert served == 200


async def test_expect_100_continue(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    head, _, body = chat(b"later", b"expect: 100-continue\r\n").partition(b"\r\n\r\n")
    client.send(head + b"\r\n\r\n")
    assert (await client.answer()).status == 100
    client.send(body)
    assert (await client.answer()).body == b"data:later"


async def test_expect_100_continue_behind_a_pipelined_request(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    head, _, body = chat(b"later", b"expect: 100-continue\r\n").partition(b"\r\n\r\n")
    client.send(chat(b"first") + head + b"\r\n\r\n")
    assert (await client.answer()).body == b"data:first"
    assert (await client.answer()).status == 100
    client.send(body)
    assert (await client.answer()).body == b"data:later"


async def test_no_100_continue_for_a_body_that_is_refused(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front(max_body_bytes=10))
    client.send(chat(b"x" * 11, b"expect: 100-continue\r\n").partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    assert (await client.answer()).status == 413


async def test_chunked_request_body(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    client.send(b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
    await asyncio.sleep(0.02)
    client.send(b"2;x=y\r\nde\r\n0\r\nx-trailer: 1\r\n\r\n" + chat(b"next"))
    assert (await client.answer()).body == b"data:abcde"
    assert (await client.answer()).body == b"data:next"


async def test_large_body_in_one_piece(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    body = bytes(range(256)) * 20_000
    client.send(chat(body))
    assert (await client.answer()).body == b"data:" + body


REFUSED = {
    "smuggling": (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\na", 400),
    "no host": (b"GET /status HTTP/1.1\r\n\r\n", 400),
    "long target": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
    "long head": (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"a" * 40_000, 431),
    "many fields": (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 101 + b"\r\n", 431),
    "expectation": (b"GET / HTTP/1.1\r\nhost: x\r\nexpect: x\r\n\r\n", 417),
}


@pytest.mark.parametrize("shape", REFUSED)
async def test_refusals_are_answered_behind_earlier_answers_and_end_the_connection(
    front: FrontFactory, connect: Connect, shape: str
) -> None:
    server = await front()
    client = await connect(server)
    raw, status = REFUSED[shape]
    client.send(chat(b"good") + raw + chat(b"never read"))
    assert (await client.answer()).body == b"data:good"
    answer = await client.answer()
    assert answer.status == status
    assert answer.headers["connection"] == "close"
    assert answer.headers["x-roost-outcome"] == "invalid_request"
    assert b'"error"' in answer.body
    assert await client.closed()
    assert server.refused.total() == 1


async def test_a_body_that_is_too_large_is_refused_before_it_is_read(front: FrontFactory, connect: Connect) -> None:
    server = await front(max_body_bytes=100_000)
    client = await connect(server)
    client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 52428800\r\n\r\n")
    client.send(b"x" * (50 << 20))
    answer = await client.answer()
    assert (answer.status, answer.headers["x-roost-outcome"]) == (413, "too_large")
    assert client.writer.transport.get_write_buffer_size() > 10 << 20
    other = await connect(server)
    other.send(chat(b"still served"))
    assert (await other.answer()).status == 200


async def test_connection_close_is_honoured(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    client.send(chat(b"last", b"connection: close\r\n"))
    answer = await client.answer()
    assert (answer.body, answer.headers["connection"]) == (b"data:last", "close")
    assert await client.closed()


async def test_http_1_0_closes_unless_asked_to_keep(front: FrontFactory, connect: Connect) -> None:
    server = await front()
    client = await connect(server)
    client.send(chat(b"one", b"connection: keep-alive\r\n", version=b"1.0"))
    answer = await client.answer()
    assert (answer.body, answer.headers["connection"]) == (b"data:one", "keep-alive")
    client.send(chat(b"two", version=b"1.0"))
    answer = await client.answer()
    assert answer.body == b"data:two"
    assert await client.closed()


async def test_head_and_options_go_to_control(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    client.send(b"HEAD /v1/chat/completions HTTP/1.1\r\n" + HOST + b"\r\n")
    answer = await client.answer(head_only=True)
    assert (answer.status, answer.headers["content-length"]) == (200, "8")
    client.send(b"OPTIONS /v1/chat/completions HTTP/1.1\r\n" + HOST + b"\r\n")
    assert (await client.answer()).status == 405
    client.send(chat(b"then data"))
    assert (await client.answer()).body == b"data:then data"


async def test_a_half_closed_client_is_still_answered(front: FrontFactory, connect: Connect) -> None:
    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.2)
        await echo(exchange)

    client = await connect(await front(slow))
    client.send(chat(b"one") + chat(b"two"))
    client.shut_write()
    bodies, interim = [], 0
    while len(bodies) < 2:
        answer = await client.answer()
        if answer.status == 100:
            interim += 1
        else:
            bodies.append(answer.body)
    assert bodies == [b"data:one", b"data:two"]
    assert interim <= 2, "more than one unasked for each request"
    assert await client.closed()


@pytest.mark.parametrize("whole", [chat(b"whole body"), get(b"/status")])
async def test_an_incomplete_request_of_a_half_closed_client_is_told_so(
    front: FrontFactory, connect: Connect, whole: bytes
) -> None:
    server = await front()
    client = await connect(server)
    client.send(chat(b"first") + whole[:-3])
    client.shut_write()
    assert (await client.answer()).body == b"data:first"
    assert (await client.answer()).status == 400
    assert await client.closed()
    await until(lambda: server.connections == 0)


@pytest.mark.parametrize("manner", ["close", "reset"])
@pytest.mark.parametrize("state", ["waiting", "streaming", "stalled"])
async def test_a_client_that_leaves_is_noticed(front: FrontFactory, connect: Connect, manner: str, state: str) -> None:
    seen: list[str] = []
    ready = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        gone = exchange.gone
        try:
            if state == "waiting":
                ready.set()
                await asyncio.Event().wait()
            exchange.start(200, [])
            while True:
                exchange.write(b"x" * (100_000 if state == "stalled" else 10))
                if exchange.writing_paused or state == "streaming":
                    ready.set()
                await exchange.drain()
                await asyncio.sleep(0.01)
        finally:
            assert exchange.is_gone
            seen.append("done" if gone.done() else "pending")

    server = await front(handler)
    client = await connect(server)
    if state == "stalled":
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.send(chat(b""))
    await asyncio.wait_for(ready.wait(), 10)
    if manner == "close":
        client.leave()
    else:
        reset(client.writer)
    await until(lambda: bool(seen), 3)
    assert seen == ["done"]
    assert server.connections == 0


async def test_slow_head_is_answered_408(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front(head_timeout_s=0.2))
    raw = chat(b"x")
    answering = asyncio.ensure_future(client.answer())
    for start in range(40):
        client.send(raw[start : start + 1])
        await asyncio.sleep(0.02)
        if answering.done():
            break
    assert (await answering).status == 408


async def test_slow_head_behind_another_request_is_answered_408(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front(head_timeout_s=0.2))
    client.send(chat(b"x") + b"POST /v1/compl")
    assert (await client.answer()).status == 200
    assert (await client.answer()).status == 408


async def test_slow_body_is_answered_408_however_it_drips(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front(body_timeout_s=0.2))
    client.send(chat(b"x" * 1000)[:-1000])
    answering = asyncio.ensure_future(client.answer())
    for _ in range(40):
        client.send(b"x")
        await asyncio.sleep(0.02)
        if answering.done():
            break
    assert (await answering).status == 408


async def test_a_long_body_that_keeps_coming_is_read(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front(body_timeout_s=0.2, min_body_rate=1000.0))
    body = b"x" * 30_000
    client.send(chat(body)[: -len(body)])
    for _ in range(30):
        client.send(body[:1000])
        await asyncio.sleep(0.02)
    assert (await client.answer()).body == b"data:" + body


async def test_an_idle_connection_is_closed(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front(keep_alive_s=0.2))
    client.send(chat(b"x"))
    await client.answer()
    assert await client.closed()


async def test_a_connection_without_a_request_is_closed(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front(head_timeout_s=0.2))
    assert await client.closed()


async def test_a_request_may_take_longer_than_every_time_out(front: FrontFactory, connect: Connect) -> None:
    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.6)
        await echo(exchange)

    client = await connect(await front(slow, head_timeout_s=0.1, body_timeout_s=0.1, keep_alive_s=0.1, stall_s=0.1))
    client.send(chat(b"x"))
    assert (await client.answer()).body == b"data:x"


async def test_a_client_that_takes_nothing_is_given_up(front: FrontFactory, connect: Connect) -> None:
    async def large(exchange: Exchange) -> None:
        exchange.respond(200, [], b"x" * 50_000_000)

    server = await front(large, stall_s=0.3)
    client = await connect(server)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.send(chat(b""))
    await until(lambda: server.connections == 1)
    await until(lambda: server.connections == 0)


async def test_connections_are_bounded(front: FrontFactory, connect: Connect) -> None:
    server = await front(max_connections=2)
    clients = [await connect(server) for _ in range(2)]
    for client in clients:
        client.send(chat(b"x"))
        assert (await client.answer()).status == 200
    third = await connect(server)
    answer = await third.answer()
    assert (answer.status, answer.headers["x-roost-outcome"], answer.headers["retry-after"]) == (429, "quota", "1")
    assert await third.closed()
    clients[0].leave()
    third.leave()
    await until(lambda: server.connections == 1)
    fourth = await connect(server)
    fourth.send(chat(b"x"))
    assert (await fourth.answer()).status == 200


async def test_nagle_is_off(front: FrontFactory, connect: Connect) -> None:
    seen = []

    async def look(exchange: Exchange) -> None:
        sock = exchange._transport.get_extra_info("socket")
        seen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        await echo(exchange)

    client = await connect(await front(look))
    client.send(chat(b""))
    await client.answer()
    assert seen[0] != 0
