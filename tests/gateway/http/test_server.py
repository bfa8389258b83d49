"""Closing a server: what is being served ends, what is idle goes, what takes too long is cut."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http import Exchange, HttpLimits, UpstreamLimits, connections_within, serve
from tests.gateway.http.conftest import Connect, FrontFactory, control_app, echo
from tests.gateway.http.raw import chat, get


async def test_close_lets_requests_end(front: FrontFactory, connect: Connect) -> None:
    go = asyncio.Event()
    begun = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        begun.set()
        await go.wait()
        await echo(exchange)

    server = await front(wait)
    idle, busy = await connect(server), await connect(server)
    idle.send(get(b"/status"))
    await idle.answer()
    busy.send(chat(b"x"))
    await begun.wait()
    closing = asyncio.ensure_future(server.close(10))
    assert await idle.closed()
    with pytest.raises(ConnectionError):
        await connect(server)
    assert not closing.done()
    go.set()
    answer = await busy.answer()
    assert (answer.body, answer.headers["connection"]) == (b"data:x", "close")
    assert await busy.closed()
    await asyncio.wait_for(closing, 5)


async def test_close_cuts_what_takes_too_long(front: FrontFactory, connect: Connect) -> None:
    cancelled = asyncio.Event()
    begun = asyncio.Event()

    async def forever(exchange: Exchange) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    server = await front(forever)
    client = await connect(server)
    client.send(chat(b"x"))
    await begun.wait()
    await asyncio.wait_for(server.close(0.1), 5)
    assert cancelled.is_set()
    assert await client.closed()
    assert server.connections == 0


async def test_close_while_clients_come(front: FrontFactory) -> None:
    for _ in range(20):
        server = await front()
        coming = [asyncio.ensure_future(asyncio.open_connection("127.0.0.1", server.port)) for _ in range(10)]
        await asyncio.sleep(0)
        await asyncio.wait_for(server.close(5), 5)
        assert server.connections == 0
        for result in await asyncio.gather(*coming, return_exceptions=True):
            if not isinstance(result, BaseException):
                result[1].transport.abort()


async def test_a_handler_that_lingers_does_not_hold_closing_up(front: FrontFactory, connect: Connect) -> None:
    cancelled = asyncio.Event()

    async def linger(exchange: Exchange) -> None:
        await echo(exchange)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    server = await front(linger)
    client = await connect(server)
    client.send(chat(b"x"))
    assert (await client.answer()).body == b"data:x"
    await asyncio.wait_for(server.close(5), 5)
    assert cancelled.is_set()


async def test_an_address_in_use_is_an_error(front: FrontFactory) -> None:
    server = await front()
    with pytest.raises(OSError, match="in use"):
        await serve(
            "127.0.0.1",
            server.port,
            data_routes=frozenset(),
            handler=echo,
            control=control_app(),
            limits=HttpLimits(),
        )


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_headers"):
        HttpLimits(max_headers=0)
    with pytest.raises(ValueError, match="idle_s"):
        UpstreamLimits(idle_s=-1)


@pytest.mark.parametrize("files", [1, 128, 1024, 1 << 20])
def test_clients_are_bounded_by_what_files_there_are(files: int) -> None:
    clients = connections_within(files)
    assert clients >= 1
    # one to the client and one to the engine, and some are left for the gateway itself
    assert 2 * clients < files or clients == 1


def test_the_nodes_of_a_fleet_take_files_too() -> None:
    assert connections_within(1 << 16) - connections_within(1 << 16, other_nodes=1000) == 4 * 1000
    assert connections_within(1024, other_nodes=1000) == 1
