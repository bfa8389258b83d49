"""A stand-in for an engine that answers at once: it shows what the gateway itself costs, and nothing about an engine.

It speaks the part of vLLM's HTTP interface that a sidecar attaches to, and answers every completion with a fixed
text of about 1 KB, or with 32 server-sent events. Results that used it say so.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import cast

import httptools
import msgspec
import uvloop

_TEXT = "All happy families are alike; each unhappy family is unhappy in its own way. " * 8
_SSE_PIECES = 32


class _Body(msgspec.Struct):
    model: str = ""
    stream: bool = False
    lora_name: str = ""


class StubEngine:
    """What the server knows: its base's name and the adapters that were loaded."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.adapters: dict[str, None] = {}
        self._decode = msgspec.json.Decoder(_Body).decode

    def answer(self, method: bytes, path: bytes, body: bytes) -> bytes:
        """The whole HTTP response to one request, as bytes."""
        if method == b"GET":
            return self._get(path)
        asked = self._decode(body)
        if path.endswith(b"/load_lora_adapter") and b"unload" not in path:
            self.adapters[asked.lora_name] = None
            return _response(b"200 OK", b"Success")
        if path.endswith(b"/unload_lora_adapter"):
            known = self.adapters.pop(asked.lora_name, self) is None
            return _response(b"200 OK" if known else b"404 Not Found", b"{}")
        if asked.model != self.base and asked.model not in self.adapters:
            return _response(b"404 Not Found", b'{"error":{"message":"no such model"}}')
        return _events(asked.model) if asked.stream else _response(b"200 OK", _completion(asked.model))

    def _get(self, path: bytes) -> bytes:
        if path == b"/v1/models":
            cards = [{"id": self.base, "root": "stub"}]
            cards += [{"id": name, "root": "stub", "parent": self.base} for name in self.adapters]
            return _response(b"200 OK", msgspec.json.encode({"object": "list", "data": cards}))
        if path == b"/version":
            return _response(b"200 OK", b'{"version":"stub"}')
        if path.endswith(b"load_lora_adapter"):
            return _response(b"405 Method Not Allowed", b"{}")
        return _response(b"200 OK" if path == b"/health" else b"404 Not Found", b"{}")


def _response(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
    return head + body


def _completion(model: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": _TEXT}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 200, "completion_tokens": 130, "total_tokens": 330}
    return msgspec.json.encode(
        {"id": "chatcmpl-1", "object": "chat.completion", "model": model, "choices": [choice], "usage": usage}
    )


def _events(model: str) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    delta = {"id": "chatcmpl-1", "model": model, "choices": [{"index": 0, "delta": {"content": "word "}}]}
    pieces = [b"data: %b\n\n" % msgspec.json.encode(delta)] * _SSE_PIECES + [b"data: [DONE]\n\n"]
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


class _Connection(asyncio.Protocol):
    def __init__(self, engine: StubEngine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.Transport, but can do the same
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._transport.write(self._engine.answer(self._parser.get_method(), self._path, self._body))


async def serve(base: str, host: str, port: int) -> asyncio.Server:
    """Start the stand-in; port 0 takes a free one."""
    engine = StubEngine(base)
    return await asyncio.get_running_loop().create_server(lambda: _Connection(engine), host, port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True)
    parser.add_argument("--port", type=int, required=True)
    asked = parser.parse_args()

    async def run() -> None:
        server = await serve(asked.base, "127.0.0.1", asked.port)
        await server.serve_forever()

    uvloop.run(run())


if __name__ == "__main__":
    main()
