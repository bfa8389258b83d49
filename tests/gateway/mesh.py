"""A small mesh in one process: a real registrar, a real gateway, nodes and engines that do as they are told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from catalog.artifacts import RegistrarStore
from catalog.keys import hash_secret, key_id, make_secret
from catalog.lookahead import Lookahead
from catalog.registrar import Registrar
from catalog.view import CatalogView
from gateway.app import Gateway
from gateway.catalog_source import CatalogSource
from gateway.settings import GatewaySettings
from tests.catalog.harness import Catalog
from wire.events import Scope
from wire.registrar import AddBase, AnyAnswer, AnyCommand, CreateKey
from wire.sockets import Responder

from .fleet_states import BASE, FINGERPRINT
from .stub_engine import StubEngine
from .stub_sidecar import StubSidecar

# the tiny dense base of the tests: two layers, hidden size 64
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


class Told(msgspec.Struct):
    """An answer that was read to its end. ``broken``: the body did not end as HTTP says it must."""

    status: int
    headers: dict[str, str]
    body: bytes
    broken: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]  # type: ignore[no-any-return]

    @property
    def events(self) -> list[Any]:
        """The server-sent events, without the last ``[DONE]``."""
        lines = [line.removeprefix(b"data: ") for line in self.body.split(b"\n\n") if line]
        return [json.loads(line) for line in lines if line != b"[DONE]"]


class Mesh:
    """Use as an async context manager. ``nodes`` nodes with one engine each; a catalog with one base."""

    def __init__(self, folder: Path, *, nodes: int = 1, engines: int = 1, gateways: int = 1, **settings: Any) -> None:
        self.folder = folder
        self.catalog = Catalog(folder)
        self.catalog.run(
            AddBase(name=BASE, fingerprint=FINGERPRINT, path="/models/tiny", config=json.dumps(CONFIG).encode())
        )
        self.engines = [StubEngine(f"n{node}e{engine}") for node in range(nodes) for engine in range(engines)]
        self.sidecars = [
            StubSidecar(f"n{node}", folder, self.engines[node * engines : (node + 1) * engines])
            for node in range(nodes)
        ]
        # they run, but no gateway is told of them by its settings
        self.outside: list[StubSidecar] = []
        self.gateways: list[Gateway] = []
        self._gateway_count = gateways
        self._settings = settings
        self._stack = contextlib.AsyncExitStack()
        self.http: aiohttp.ClientSession
        self.registrar: Registrar
        self.registrar_store: RegistrarStore = self.catalog.store
        self._responder: Responder[AnyCommand, AnyAnswer]

    @property
    def engine(self) -> StubEngine:
        return self.engines[0]

    @property
    def sidecar(self) -> StubSidecar:
        return self.sidecars[0]

    @property
    def url(self) -> str:
        return self.url_of(0)

    def url_of(self, gateway: int) -> str:
        return f"http://127.0.0.1:{self.gateways[gateway].port}"

    async def __aenter__(self) -> Self:
        self.start_registrar()
        for engine in self.engines:
            await engine.start()
            self._stack.push_async_callback(engine.stop)
        for sidecar in self.sidecars:
            sidecar.start()
            self._stack.callback(sidecar.stop)
        source = CatalogSource(self.folder, open_view=lambda _: CatalogView(self.catalog.environment))
        for number in range(self._gateway_count):
            gateway = await Gateway.start(self._gateway_settings(number), catalog=source)
            self._stack.push_async_callback(gateway.stop, drain_s=0.0)
            self.gateways.append(gateway)
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession())
        await until(lambda: all(node.heard for gateway in self.gateways for node in gateway.nodes))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def publish(self, policy: str, content: bytes = b"") -> str:
        """A new revision with bytes of its own; its reference."""
        done = self.catalog.publish(policy, content or policy.encode(), create_over=BASE)
        return f"{policy}@{done.revision}"

    def key(self, tenant: str, *scopes: Scope) -> dict[str, str]:
        """The headers of a new key."""
        secret = make_secret()
        self.catalog.run(
            CreateKey(key_id=key_id(secret), key_hash=hash_secret(secret), tenant=tenant, scopes=scopes or tuple(Scope))
        )
        return {"authorization": f"Bearer {secret}"}

    async def chat(
        self, model: str, *, headers: Mapping[str, str] | None = None, gateway: int = 0, **fields: Any
    ) -> Told:
        """Ask the chat route, and read the answer to its end."""
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.ask("POST", "/v1/chat/completions", gateway=gateway, headers=headers, json=body)

    async def ask(self, method: str, path: str, *, gateway: int = 0, **arguments: Any) -> Told:
        async with self.http.request(method, self.url_of(gateway) + path, **arguments) as response:
            body = bytearray()
            broken = False
            try:
                async for piece in response.content.iter_any():
                    body += piece
            except aiohttp.ClientPayloadError:
                broken = True
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Told(response.status, headers, bytes(body), broken)

    @contextlib.asynccontextmanager
    async def streaming(self, model: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """A streamed chat whose first bytes have come; the connection is cut at the end."""
        body = {"model": model, "messages": [], "stream": True}
        async with self.http.post(self.url + "/v1/chat/completions", json=body) as response:
            await response.content.readany()
            yield response
            response.close()

    async def all_leases_are_back(self) -> None:
        """Wait until no sidecar has a lease out. Fails by the test's time-out."""
        await until(lambda: not any(sidecar.held for sidecar in self.sidecars))

    def outcomes(self, route: str = "chat") -> dict[str, int]:
        """How often the first gateway counted each outcome."""
        return {outcome.value: count for outcome, count in self.gateways[0].metrics.routes[route].outcomes.items()}

    def start_registrar(self) -> None:
        """Over the catalog as it is; also after ``stop_registrar``."""
        registrar = self.registrar = Registrar(self.catalog.ledger, publish=lambda event: None, batch_max=64)
        self._stack.push_async_callback(registrar.stop)
        take = registrar.take
        if (look := self.registrar_store.look) is not None:
            lookahead = Lookahead(registrar.take, look, self.registrar_store.missed)
            self._stack.push_async_callback(lookahead.close)
            take = lookahead.take
        responder: Responder[AnyCommand, AnyAnswer] = Responder(
            f"ipc://{self.folder}/registrar.sock", AnyCommand, AnyAnswer, take
        )
        self._stack.callback(responder.close)
        self._responder = responder

    def stop_registrar(self) -> None:
        """Nobody answers commands any more."""
        self._responder.close()

    def _gateway_settings(self, number: int) -> GatewaySettings:
        given = {"anonymous": True, "access_log": False} | self._settings
        return GatewaySettings(
            name=f"g{number}",
            port=0,
            catalog_dir=str(self.folder / "catalog"),
            store_dir=str(self.folder / "store"),
            registrar_endpoint=f"ipc://{self.folder}/registrar.sock",
            nodes=tuple(sidecar.address for sidecar in self.sidecars if sidecar not in self.outside),
            **given,
        )


async def until(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Wait until ``condition`` holds; fails when it doesn't in time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for is another object's state
            await asyncio.sleep(0.005)
