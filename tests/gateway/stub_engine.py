"""An engine's HTTP side as vLLM shows it, with failures on demand."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Script = Callable[["StubEngine", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class StubEngine:
    """Answers with its own name and the model's, so that a test sees who answered with what.

    ``scripts`` are used up first, one a request. ``asked`` keeps the bodies, ``headers`` what came with them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self.scripts: deque[Script] = deque()
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborted = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self._handle)
        app.router.add_post("/v1/completions", self._handle)
        app.router.add_post("/generate", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        script = self.scripts.popleft() if self.scripts else answer
        try:
            return await script(self, request, body)
        except asyncio.CancelledError:
            self.aborted += 1
            raise


async def answer(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """An ordinary answer, streamed if asked for; ``n`` choices, and usage where vLLM tells it."""
    words = ["the ", "engine ", engine.name]
    if body.get("stream"):
        return await _stream(engine, request, body, words)
    message = {"role": "assistant", "content": "".join(words)}
    choices: list[dict[str, Any]] = [{"index": i, "message": message} for i in range(body.get("n", 1))]
    if body.get("logprobs"):
        choices = [choice | {"logprobs": {"content": [{"token": "the", "logprob": -0.5}]}} for choice in choices]
    return _compact({"id": "x", "model": body["model"], "choices": choices, "usage": {"total_tokens": 7}})


async def _stream(
    engine: StubEngine, request: web.Request, body: dict[str, Any], words: list[str]
) -> web.StreamResponse:
    response = await begin_stream(request)
    for word in words:
        for index in range(body.get("n", 1)):
            await send_chunk(response, body["model"], word, index)
    if (body.get("stream_options") or {}).get("include_usage"):
        await send_event(response, {"id": "x", "model": body["model"], "choices": [], "usage": {"total_tokens": 7}})
    await response.write(b"data: [DONE]\n\n")
    return response


async def begin_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def send_chunk(response: web.StreamResponse, model: str, text: str, index: int = 0) -> None:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": None}
    await send_event(response, {"id": "x", "object": "chat.completion.chunk", "model": model, "choices": [choice]})


async def send_event(response: web.StreamResponse, document: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n")


def refuse(status: int, message: str = "no") -> Script:
    """An error answer in vLLM's form; ``{model}`` in ``message`` stands for the model that was asked."""

    async def script(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = {"message": message.format(model=body["model"]), "type": "x", "param": None, "code": status}
        return _compact({"error": error}, status)

    return script


def fail_in_stream(status: int) -> Script:
    """200, and then the error as the first event, as vLLM does."""

    async def script(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await send_event(response, {"error": {"message": "no", "type": "x", "param": None, "code": status}})
        await response.write(b"data: [DONE]\n\n")
        return response

    return script


async def die_before_answering(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The connection breaks before a byte of the answer."""
    _break(request)
    await asyncio.Event().wait()
    raise AssertionError("cancelled before")


def die_after_chunks(count: int) -> Script:
    """The connection breaks in the middle of a stream."""

    async def script(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        for _ in range(count):
            await send_chunk(response, body["model"], "word ")
        await asyncio.sleep(0.05)
        _break(request)
        return response

    return script


async def go_on_for_ever(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A stream that ends only when somebody aborts it."""
    response = await begin_stream(request)
    while True:
        await send_chunk(response, body["model"], "word ")
        await asyncio.sleep(0.01)


async def never_answer(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """An engine that hangs."""
    await asyncio.Event().wait()
    raise AssertionError("cancelled before")


def _break(request: web.Request) -> None:
    transport = request.transport
    assert isinstance(transport, asyncio.Transport)
    transport.abort()


def _compact(document: dict[str, Any], status: int = 200) -> web.Response:
    body = json.dumps(document, separators=(",", ":")).encode()
    return web.Response(body=body, status=status, content_type="application/json")
