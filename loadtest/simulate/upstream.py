"""Requests to modelled engines over modelled connections, answered as vLLM's server answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Many
from typing import Any

import msgspec

from gateway.http import Pair, UpstreamFailed, UpstreamResponse
from wire.outcomes import DeadlinePassed

from .backend import EngineProcess
from .engine import EngineModel, Sequence
from .network import Network, Pipe

_JSON: list[Pair] = [(b"content-type", b"application/json")]
_STREAM: list[Pair] = [(b"content-type", b"text/event-stream; charset=utf-8")]
_DONE = b"data: [DONE]\n\n"


class _Asked(msgspec.Struct):
    """What the model looks at in a request; a prompt is a list of token ids."""

    model: str
    prompt: list[int] = []
    max_tokens: int = 16
    stream: bool = False


_decode = msgspec.json.Decoder(_Asked).decode


class Exchange:
    """One request at an engine and the answer on its way back. What travels can be held up by a cut of the network."""

    def __init__(self, network: Network, gateway: str, node: str, asked: _Asked, deadline: float) -> None:
        self._network = network
        self._ends = gateway, node
        self._asked = asked
        self._loop = asyncio.get_running_loop()
        self._response: UpstreamResponse | None = None
        self._sequence: Sequence | None = None
        self._model: EngineModel | None = None
        self._contents: dict[str, None] = {}
        self._over = False
        self.head: asyncio.Future[UpstreamResponse] = self._loop.create_future()
        self._back = Pipe(self._arrive)
        self._forth = Pipe(self._at_engine)
        self._timer = self._loop.call_at(deadline, self._expire)
        network.watch(self._look)
        self._look()

    def send(self, engine: EngineProcess) -> None:
        self._forth.put(engine)

    # at the engine

    def _at_engine(self, piece: EngineProcess | None) -> None:
        if piece is not None:
            self._loop.call_later(piece.passes_in(piece.constants.request_s), self._reach, piece)
        elif self._sequence is not None and self._model is not None:
            self._model.abort(self._sequence)

    def _reach(self, engine: EngineProcess) -> None:
        if self._over:
            return
        asked = self._asked
        if engine.model is None or not engine.ready:
            self._back.put(UpstreamFailed("the engine can't be connected to", request_sent=False))
            return
        self._model = engine.model
        adapter = "" if asked.model == engine.settings.base else asked.model
        self._sequence = Sequence(adapter, len(asked.prompt), asked.max_tokens, self._on_token, self._on_failure)
        if not self._model.submit(self._sequence):
            self._back.put((404, _JSON, b'{"error":{"message":"no such model","code":404}}', True))
        elif asked.stream:
            self._back.put((200, _STREAM, b"", False))

    def _on_token(self, content: str, last: bool) -> None:
        self._contents[content] = None
        said = "+".join(self._contents)
        if self._asked.stream:
            event = msgspec.json.encode({"model": self._asked.model, "choices": [{"index": 0, "text": said}]})
            self._back.put((0, _STREAM, b"data: %b\n\n" % event + (_DONE if last else b""), last))
        elif last:
            usage = {"prompt_tokens": len(self._asked.prompt), "completion_tokens": self._asked.max_tokens}
            body = {"model": self._asked.model, "choices": [{"index": 0, "text": said}], "usage": usage}
            self._back.put((200, _JSON, msgspec.json.encode(body), True))

    def _on_failure(self, message: str) -> None:
        self._back.put(UpstreamFailed(message))

    # at the gateway

    def set_reading(self, on: bool) -> None:
        """Clients of the simulation keep up."""

    def abort(self) -> None:
        """The gateway gives the answer up: the engine hears of it unless the network is cut."""
        if not self._over:
            self._end()
            self._forth.put(None)

    def _arrive(self, piece: Any) -> None:
        if self._over:
            return
        if isinstance(piece, UpstreamFailed):
            self._fail(piece)
            return
        status, headers, data, last = piece
        if self._response is None:
            length = len(data) if last else None
            self._response = UpstreamResponse(status, list(headers), length, self)
            if not self.head.done():
                self.head.set_result(self._response)
        if last:
            self._end()
        if data or last:
            self._response.push(data, last)

    def _expire(self) -> None:
        if not self._over:
            self._fail(DeadlinePassed("the engine did not answer before the request's deadline"))
            self._forth.put(None)

    def _fail(self, error: UpstreamFailed | DeadlinePassed) -> None:
        self._end()
        if self._response is not None:
            self._response.fail(error)
        elif not self.head.done():
            self.head.set_exception(error)

    def _end(self) -> None:
        self._over = True
        self._timer.cancel()
        self._network.forget(self._look)

    def _look(self) -> None:
        for pipe in (self._forth, self._back):
            if self._network.is_cut(*self._ends):
                pipe.hold()
            else:
                pipe.flow()


class ModelUpstream:
    """As ``gateway.http.UpstreamPool``. ``engines`` maps (host, port) to (node, engine process)."""

    def __init__(
        self, network: Network, gateway: str, engines: dict[tuple[str, int], tuple[str, EngineProcess]]
    ) -> None:
        self._network = network
        self._gateway = gateway
        self._engines = engines
        self._open: dict[Exchange, None] = {}

    async def request(
        self, host: str, port: int, *, target: bytes, headers: Many[Pair], body: bytes, deadline: float,
        method: bytes = b"POST",
    ) -> UpstreamResponse:  # fmt: skip
        """Raises UpstreamFailed or DeadlinePassed. Cancelled, the engine gives up the work."""
        node, engine = self._engines[host, port]
        exchange = Exchange(self._network, self._gateway, node, _decode(body), deadline)
        self._open[exchange] = None
        try:
            exchange.send(engine)
            return await exchange.head
        except asyncio.CancelledError:
            exchange.abort()
            raise
        finally:
            self._open.pop(exchange, None)

    def close(self) -> None:
        """The gateway's process ends: what it has open is broken off."""
        for exchange in list(self._open):
            exchange.abort()
