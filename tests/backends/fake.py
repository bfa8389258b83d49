"""A server that answers what it is told to: for what a real engine can't be made to do on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from backends.process import free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Fake:
    """A server whose every route is answered by ``handler``."""

    def __init__(self) -> None:
        self.handler: Handler = answer(200)

    async def dispatch(self, request: web.Request) -> web.StreamResponse:
        return await self.handler(request)


def answer(status: int, body: object = None, text: str | None = None) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text) if text is not None else web.json_response(body, status=status)

    return handler


def vllm_error(status: int, message: str) -> Handler:
    return answer(status, {"error": {"message": message, "type": "InternalServerError", "code": status}})


async def silence(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(1)
    return web.Response()


async def break_off(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@asynccontextmanager
async def serving(fake: Fake) -> AsyncIterator[int]:
    """Serve ``fake`` on a free port, which is yielded."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.dispatch)
    async with served(app) as port:
        yield port


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[int]:
    """Serve ``app`` on a free port, which is yielded."""
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    port = free_port("127.0.0.1")
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield port
    finally:
        await runner.cleanup()
