"""A front door with an echo behind it, clients on raw sockets, and an upstream that does as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import uvloop
from aiohttp import web

from gateway.http import DataHandler, Exchange, HttpLimits, Server, UpstreamPool, serve
from tests.gateway.http.raw import RawClient, RawUpstream

DATA_ROUTES = frozenset({("POST", "/v1/chat/completions"), ("POST", "/v1/completions")})


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


async def echo(exchange: Exchange) -> None:
    exchange.respond(200, [(b"content-type", b"text/plain")], b"data:" + exchange.body)


def control_app() -> web.Application:
    app = web.Application(client_max_size=1 << 30)

    async def status(request: web.Request) -> web.Response:
        return web.Response(text="control:" + request.query_string)

    async def upload(request: web.Request) -> web.Response:
        return web.Response(body=b"upload:" + await request.read())

    async def count(request: web.Request) -> web.Response:
        size = 0
        async for piece in request.content.iter_any():
            size += len(piece)
        return web.Response(text=str(size))

    async def early(_: web.Request) -> web.Response:
        return web.Response(status=401, text="early")

    async def fields(request: web.Request) -> web.Response:
        return web.json_response([[name.lower(), value] for name, value in request.headers.items()])

    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(3):
            await response.write(b"event%d;" % number)
        await response.write_eof()
        return response

    async def broken(_: web.Request) -> web.Response:
        raise RuntimeError("a control handler that fails")

    app.router.add_get("/status", status)
    app.router.add_put("/upload", upload)
    app.router.add_put("/count", count)
    app.router.add_put("/early", early)
    app.router.add_get("/fields", fields)
    app.router.add_get("/events", events)
    app.router.add_get("/broken", broken)
    app.router.add_get("/v1/chat/completions", status)
    return app


FrontFactory = Callable[..., Awaitable[Server]]
Connect = Callable[[Server], Awaitable[RawClient]]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as exits:
        yield exits


@pytest.fixture
def front(stack: AsyncExitStack) -> FrontFactory:
    """Starts a server; ``limits`` by keyword."""

    @asynccontextmanager
    async def running(handler: DataHandler, limits: HttpLimits) -> AsyncIterator[Server]:
        server = await serve(
            "127.0.0.1", 0, data_routes=DATA_ROUTES, handler=handler, control=control_app(), limits=limits
        )
        try:
            yield server
        finally:
            await server.close(0)

    async def start(handler: DataHandler = echo, **limits: Any) -> Server:
        return await stack.enter_async_context(running(handler, HttpLimits(**limits)))

    return start


@pytest.fixture
def connect(stack: AsyncExitStack) -> Connect:
    async def open_client(server: Server) -> RawClient:
        return await stack.enter_async_context(RawClient.connected(server.port))

    return open_client


@pytest.fixture
def upstream(stack: AsyncExitStack) -> Callable[[Any], Awaitable[RawUpstream]]:
    async def start(script: Any) -> RawUpstream:
        return await stack.enter_async_context(RawUpstream.running(script))

    return start


@pytest.fixture
async def pool() -> AsyncIterator[UpstreamPool]:
    made = UpstreamPool()
    yield made
    made.close()
