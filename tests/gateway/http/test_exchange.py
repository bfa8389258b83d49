"""What a handler may do with an exchange, and what the client sees of it."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http import Exchange
from tests.gateway.http.conftest import Connect, FrontFactory
from tests.gateway.http.raw import HOST, chat
from wire.outcomes import ClientGone, ColdLoadBound


async def test_shows_the_request(front: FrontFactory, connect: Connect) -> None:
    seen: list[Exchange] = []

    async def look(exchange: Exchange) -> None:
        seen.append(exchange)
        exchange.respond(204, [], b"")

    client = await connect(await front(look))
    client.send(b"POST /v1/completions?a=b HTTP/1.1\r\n" + HOST + b"X-Key: V\r\ncontent-length: 2\r\n\r\nhi")
    answer = await client.answer()
    assert answer.status == 204
    assert "content-length" not in answer.headers
    (exchange,) = seen
    assert (exchange.method, exchange.path, exchange.target) == ("POST", "/v1/completions", b"/v1/completions?a=b")
    assert (exchange.headers.get(b"x-key"), exchange.body, exchange.peer) == (b"V", b"hi", "127.0.0.1")
    assert exchange.received_at <= exchange.answered_at
    assert exchange.finished


async def test_streams_in_chunks(front: FrontFactory, connect: Connect) -> None:
    step = asyncio.Event()

    async def stream(exchange: Exchange) -> None:
        exchange.start(200, [(b"content-type", b"text/event-stream")])
        exchange.write(b"first")
        await step.wait()
        exchange.write(b"")
        exchange.write(b"second")
        await exchange.drain()
        exchange.finish()

    client = await connect(await front(stream))
    client.send(chat(b""))
    answer = await client.answer(head_only=True)
    assert (answer.headers["transfer-encoding"], answer.headers["content-type"]) == ("chunked", "text/event-stream")
    assert await client.chunk() == b"first"
    step.set()
    assert [await client.chunk(), await client.chunk()] == [b"second", b""]
    client.send(chat(b""))
    assert (await client.answer()).body == b"firstsecond"


async def test_streams_to_http_1_0_until_the_end_of_the_connection(front: FrontFactory, connect: Connect) -> None:
    async def stream(exchange: Exchange) -> None:
        exchange.start(200, [])
        exchange.write(b"first")
        exchange.write(b"second")
        exchange.finish()

    client = await connect(await front(stream))
    client.send(chat(b"", b"connection: keep-alive\r\n", version=b"1.0"))
    answer = await client.answer()
    assert answer.body == b"firstsecond"
    assert "transfer-encoding" not in answer.headers


@pytest.mark.parametrize("how", ["abort", "return", "raise", "refuse"])
async def test_an_unfinished_stream_is_seen_as_cut(front: FrontFactory, connect: Connect, how: str) -> None:
    async def stream(exchange: Exchange) -> None:
        exchange.start(200, [])
        exchange.write(b"first")
        if how == "abort":
            exchange.abort()
        elif how == "raise":
            raise ValueError("a bug")
        elif how == "refuse":
            raise ColdLoadBound("too late to say so")

    client = await connect(await front(stream))
    client.send(chat(b"") * 2)
    await client.answer(head_only=True)
    assert await client.chunk() == b"first"
    assert await client.closed()


async def test_refusals_of_a_handler_become_answers(front: FrontFactory, connect: Connect) -> None:
    async def refuse(exchange: Exchange) -> None:
        raise ColdLoadBound("loads are queued", field="model", retry_after_s=2.1)

    client = await connect(await front(refuse))
    client.send(chat(b"") * 2)
    for _ in range(2):
        answer = await client.answer()
        assert (answer.status, answer.headers["retry-after"]) == (429, "3")
        assert answer.headers["x-roost-outcome"] == "cold_load_bound"
        assert b'"param":"model"' in answer.body


async def test_a_failing_handler_is_answered_500(front: FrontFactory, connect: Connect) -> None:
    async def fail(exchange: Exchange) -> None:
        raise ValueError("a bug")

    client = await connect(await front(fail))
    client.send(chat(b""))
    answer = await client.answer()
    assert answer.status == 500
    assert b"a bug" not in answer.body


async def test_a_handler_that_answers_nothing_ends_the_connection(front: FrontFactory, connect: Connect) -> None:
    async def nothing(exchange: Exchange) -> None:
        return

    client = await connect(await front(nothing))
    client.send(chat(b""))
    assert await client.closed()


async def test_a_header_cannot_forge_another(front: FrontFactory, connect: Connect) -> None:
    async def forge(exchange: Exchange) -> None:
        exchange.respond(200, [(b"x-a", b"b\r\nset-cookie: c")], b"")

    client = await connect(await front(forge))
    client.send(chat(b""))
    answer = await client.answer()
    assert answer.status == 500
    assert "set-cookie" not in answer.headers


async def test_misuse_is_an_error(front: FrontFactory, connect: Connect) -> None:
    errors: list[type[Exception]] = []

    async def misuse(exchange: Exchange) -> None:
        for call in (exchange.finish, lambda: exchange.write(b"x"), lambda: exchange.start(204, [])):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                call()
            errors.append(caught.type)
        exchange.respond(200, [], b"x")
        for call in (exchange.finish, lambda: exchange.write(b"x"), lambda: exchange.respond(200, [], b"")):
            with pytest.raises(RuntimeError) as caught_again:
                call()
            errors.append(caught_again.type)

    client = await connect(await front(misuse))
    client.send(chat(b""))
    assert (await client.answer()).body == b"x"
    assert errors == [RuntimeError, RuntimeError, ValueError, RuntimeError, RuntimeError, RuntimeError]


async def test_drain_waits_for_a_slow_client(front: FrontFactory, connect: Connect) -> None:
    written = 0

    async def stream(exchange: Exchange) -> None:
        nonlocal written
        exchange.start(200, [])
        for _ in range(500):
            exchange.write(b"x" * 100_000)
            written += 1
            await exchange.drain()
        exchange.finish()

    client = await connect(await front(stream))
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.send(chat(b""))
    await asyncio.sleep(0.3)
    assert 0 < written < 200, "a slow client does not hold the handler back"
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert len((await client.answer()).body) == 50_000_000


async def test_after_the_client_went_writing_does_nothing(front: FrontFactory, connect: Connect) -> None:
    result: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def stubborn(exchange: Exchange) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            exchange.start(200, [])
            exchange.write(b"x")
            with pytest.raises(ClientGone):
                await exchange.drain()
            exchange.finish()
            await exchange.gone
            result.set_result("ended")

    client = await connect(await front(stubborn))
    client.send(chat(b""))
    await asyncio.sleep(0.05)
    client.leave()
    assert await asyncio.wait_for(result, 3) == "ended"
