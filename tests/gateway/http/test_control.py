"""Control requests on the same port and the same connections, served by aiohttp."""

from __future__ import annotations

import asyncio
import json

from tests.gateway.http.conftest import Connect, FrontFactory
from tests.gateway.http.raw import HOST, chat, get, until


def put(target: bytes, body: bytes, extra: bytes = b"") -> bytes:
    return b"PUT %b HTTP/1.1\r\n%bcontent-length: %d\r\n%b\r\n%b" % (target, HOST, len(body), extra, body)


async def test_both_kinds_alternate_on_one_connection(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    for number in range(5):
        client.send(get(b"/status?%d" % number))
        assert (await client.answer()).body == b"control:%d" % number
        client.send(chat(b"%d" % number))
        assert (await client.answer()).body == b"data:%d" % number


async def test_pipelined_both_kinds_with_bodies(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    client.send(put(b"/upload", b"u1") + chat(b"d1") + put(b"/early", b"x" * 100) + get(b"/events") + chat(b"d2"))
    bodies = [(await client.answer()).body for _ in range(5)]
    assert bodies == [b"upload:u1", b"data:d1", b"early", b"event0;event1;event2;", b"data:d2"]


async def test_a_large_upload_is_streamed(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front(max_body_bytes=1000))
    body = b"x" * 20_000_000
    client.send(put(b"/count", body) + chat(b"next"))
    assert (await client.answer()).body == b"20000000"
    assert (await client.answer()).body == b"data:next"


async def test_a_chunked_upload(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    client.send(b"PUT /upload HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
    await asyncio.sleep(0.02)
    client.send(b"4;x=y\r\ndefg\r\n")
    await asyncio.sleep(0.02)
    client.send(b"0\r\nx-trailer: 1\r\n\r\n" + chat(b"next"))
    assert (await client.answer()).body == b"upload:abcdefg"
    assert (await client.answer()).body == b"data:next"


async def test_control_uploads_have_a_bound(front: FrontFactory, connect: Connect) -> None:
    server = await front(max_control_body_bytes=1000)
    client = await connect(server)
    client.send(put(b"/upload", b"x" * 1001))
    assert (await client.answer()).status == 413
    client = await connect(server)
    client.send(b"PUT /upload HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n")
    for _ in range(3):
        client.send(b"200\r\n" + b"x" * 512 + b"\r\n")
        await asyncio.sleep(0.01)
    assert (await client.answer()).status == 413
    assert await client.closed()


async def test_expect_100_continue(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    head = put(b"/upload", b"later", b"expect: 100-continue\r\n")[:-5]
    client.send(head)
    assert (await client.answer()).status == 100
    client.send(b"later")
    assert (await client.answer()).body == b"upload:later"


async def test_hop_by_hop_fields_stay_here(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    extra = b"connection: keep-alive, x-mine\r\nx-mine: 1\r\nte: trailers\r\nupgrade: h2c\r\nx-other: 2\r\n"
    client.send(get(b"/fields", extra))
    assert sorted(json.loads((await client.answer()).body)) == [["host", "test"], ["x-other", "2"]]


async def test_failures_of_control_handlers_leave_data_alone(front: FrontFactory, connect: Connect) -> None:
    server = await front()
    client = await connect(server)
    client.send(get(b"/broken"))
    assert (await client.answer()).status == 500
    client = await connect(server)
    client.send(get(b"/nothing-here") + chat(b"next"))
    assert (await client.answer()).status == 404
    assert (await client.answer()).body == b"data:next"


async def test_connection_close(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    client.send(get(b"/status", b"connection: close\r\n"))
    assert (await client.answer()).body == b"control:"
    assert await client.closed()


async def test_http_1_0(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    client.send(b"GET /status HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    assert (await client.answer()).headers["connection"] == "keep-alive"
    client.send(b"GET /events HTTP/1.0\r\n\r\n")
    assert (await client.answer()).body == b"event0;event1;event2;"


async def test_a_half_closed_client_is_still_answered(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    client.send(put(b"/upload", b"x"))
    client.shut_write()
    answer = await client.answer()
    while answer.status == 100:
        answer = await client.answer()
    assert answer.body == b"upload:x"
    assert await client.closed()


async def test_an_upload_that_ends_too_early_is_refused_at_once(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    client.send(put(b"/upload", b"x" * 1000)[:-500])
    await asyncio.sleep(0.05)
    client.shut_write()
    answer = await client.answer()
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "invalid_request")
    assert await client.closed()


async def test_a_malformed_upload_is_refused(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front())
    client.send(
        b"PUT /upload HTTP/1.1\r\n" + HOST + b"expect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
    )
    assert (await client.answer()).status == 100
    client.send(b"zz\r\n")
    assert (await client.answer()).status == 400
    assert await client.closed()


async def test_a_client_that_leaves_inside_an_upload(front: FrontFactory, connect: Connect) -> None:
    server = await front()
    client = await connect(server)
    client.send(put(b"/upload", b"x" * 100)[:-50])
    await until(lambda: server.connections == 1)
    client.leave()
    await until(lambda: server.connections == 0)
    other = await connect(server)
    other.send(put(b"/upload", b"y"))
    assert (await other.answer()).body == b"upload:y"


async def test_close_lets_an_upload_end(front: FrontFactory, connect: Connect) -> None:
    server = await front()
    client = await connect(server)
    raw = put(b"/upload", b"x" * 100)
    client.send(raw[:-50])
    await asyncio.sleep(0.05)
    closing = asyncio.ensure_future(server.close(10))
    await asyncio.sleep(0.05)
    assert not closing.done()
    client.send(raw[-50:])
    assert (await client.answer()).body == b"upload:" + b"x" * 100
    assert await client.closed()
    await asyncio.wait_for(closing, 5)


async def test_a_slow_upload_is_cut(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front(body_timeout_s=0.2))
    client.send(put(b"/upload", b"x" * 100)[:-50])
    assert (await client.answer()).status == 408
    assert await client.closed()


async def test_an_idle_connection_is_closed(front: FrontFactory, connect: Connect) -> None:
    client = await connect(await front(keep_alive_s=0.2))
    client.send(get(b"/status"))
    await client.answer()
    assert await client.closed()
