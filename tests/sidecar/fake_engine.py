"""Engines for the service's tests: one in this process that obeys, and one behind vLLM's HTTP routes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from aiohttp import web
from blake3 import blake3

from backends.interface import EngineLimits, EngineSettings, Health, Installable, Removal
from backends.vllm.terms import ENGINE_ROUTE
from tests.backends.fake import Fake
from wire.outcomes import RoostError

from .bench import BASE, limits


class FakeBackend:
    """An engine that outlives drivers: hand the same one to the next sidecar and it is adopted.

    Installs read the arena, and wait for ``gate``; ``failure``, where set, is raised instead.
    """

    def __init__(self, name: str = "e1", *, slots: int = 4, base: str = BASE) -> None:
        self.settings = EngineSettings(name=name, base=base, fingerprint="f")
        self.detail = ""
        self.slots = slots
        self.adapters: set[str] = set()
        self.busy: set[str] = set()
        self.installs: list[str] = []
        self.removals: list[str] = []
        self.starts = 0
        self.alive = False
        self.detached = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: RoostError | None = None
        self.at_once = 0

    async def start(self) -> None:
        self.starts += 1
        self.alive = True
        self.detached = False

    async def health(self) -> Health:
        return Health.READY if self.alive else Health.DEAD

    async def limits(self) -> EngineLimits:
        return limits(self.slots)

    async def install(self, adapter: Installable, timeout_s: float) -> None:
        self.installs.append(adapter.adapter)
        self.at_once += 1
        try:
            assert self.at_once == 1, "calls are sent one at a time"
            await self.gate.wait()
            if self.failure is not None:
                raise self.failure
            with adapter.view() as view:
                assert blake3(view).hexdigest() == adapter.digest
            self.adapters.add(adapter.adapter)
            assert len(self.adapters) <= self.slots, "more adapters than slots"
        finally:
            self.at_once -= 1

    async def remove(self, adapter: str, timeout_s: float) -> Removal:
        self.removals.append(adapter)
        if adapter in self.busy:
            return Removal.BUSY
        if adapter not in self.adapters:
            return Removal.ABSENT
        self.adapters.remove(adapter)
        return Removal.REMOVED

    async def installed(self) -> frozenset[str]:
        return frozenset(self.adapters)

    async def stop(self) -> None:
        self.die()

    async def detach(self) -> None:
        self.detached = True

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", 8001

    @property
    def pid(self) -> int | None:
        return 1234

    def token(self) -> str:
        return "fake token"

    def die(self) -> None:
        self.alive = False
        self.adapters.clear()
        self.detail = "killed"


class FakeVllm(Fake):
    """The routes of a vLLM server with our plug-in, for a driver in another process."""

    def __init__(self, base: str, *, slots: int = 4) -> None:
        super().__init__()
        self._base = base
        self._slots = slots
        self.adapters: dict[str, str] = {}
        self.loads: list[str] = []

    async def dispatch(self, request: web.Request) -> web.StreamResponse:
        route = f"{request.method} {request.path}"
        if route == "POST /v1/load_lora_adapter":
            body = await request.json()
            self.loads.append(body["lora_name"])
            self.adapters[body["lora_name"]] = body["lora_path"]
            return web.json_response({})
        if route == "POST /v1/unload_lora_adapter":
            known = self.adapters.pop((await request.json())["lora_name"], None)
            return web.json_response({}, status=200 if known else 404)
        if route == "GET /v1/models":
            return web.json_response({"data": [{"id": self._base}, *self._cards(self.adapters)]})
        if route == f"GET {ENGINE_ROUTE}":
            return web.json_response(
                {
                    "plugin": 1,
                    "slots": self._slots,
                    "max_rank": 16,
                    "dtype": "float32",
                    "targets": ["q", "v"],
                    "adapters": dict.fromkeys(self.adapters, 0),
                }
            )
        if route == "GET /v1/load_lora_adapter":
            return web.Response(status=405)
        return web.Response(status=200 if route == "GET /health" else 404)

    def _cards(self, adapters: Iterable[str]) -> list[dict[str, str]]:
        return [{"id": adapter, "parent": self._base} for adapter in adapters]
