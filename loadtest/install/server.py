"""Installs through a server and its driver: time, alone and beside a stream of the base, and the stream's longest gaps.

The server has our additions, and the workers of a vLLM measure installs by themselves as well (``inside``). The stock
way is the load call of a PEFT folder (``engines`` says what becomes of it); such loads are sent at once, as a stock
server gets them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec

from backends.interface import EngineBackend, EngineSettings, Health, Installable
from backends.registry import make_backend
from backends.sglang.client import SglangClient
from backends.vllm.client import VllmClient

from .adapters import Adapter
from .bases import Base
from .engines import client_of, engine_settings
from .figures import Gaps, Round, Rounds, intervals_ms
from .jobs import EXTENSION, MEASURE, Grid, Live, Measure, Measured, Served
from .streaming import TokenStream

_LOAD_S = 300.0
_WORKER_S = 3600.0
# tokens of the stream before loads are sent, and after the last of them
_QUIET, _AFTER = 40, 4
# the first tokens of a stream are slower
_FIRST = 4
_WARM = 40
# an engine pins the arena's memory in the background once it has seen it: at least so many bytes a second
_PINNED_S, _PINNED_RATE = 3.0, 500e6

Way = Callable[[list[tuple[str, Adapter]]], Awaitable[tuple[list[str], list[float]]]]


async def measure(
    root: Path, base: Base, engine: str, measures: Sequence[Measure], found: Callable[[Measured | Served], None]
) -> None:
    """Start a server with slots for all of ``measures``, do them, tell what was ``found``, and end it.

    Raises RuntimeError where it can't.
    """
    rank = max(one.rank for one in measures)
    settings = engine_settings(base, rank, base.write(root / base.name), engine)
    if any(one.worker is not None for one in measures):
        settings = _measuring(settings)
    backend = make_backend(settings, run_dir=root / "run", log_dir=root)
    await backend.start()
    try:
        await _until_ready(backend)
        client = client_of(backend)
        try:
            for one in measures:
                if one.worker is not None:
                    found(await _in_its_worker(backend, one))
                if one.server is not None or one.live is not None:
                    found(await _Session(backend, client, base.name, one).measure())
        finally:
            await client.close()
    finally:
        await backend.stop()


class _Session:
    def __init__(self, backend: EngineBackend, client: VllmClient | SglangClient, model: str, measure: Measure) -> None:
        self._backend, self._client, self._model = backend, client, model
        self._wanted = measure
        self._found = Served(measure.rank, Rounds(), Rounds(), Gaps())

    async def measure(self) -> Served:
        adapters, found = self._wanted.adapters, self._found
        async with self._stream() as stream:
            # the first tokens and the first load of each way compile, map, and bring files into memory
            await stream.more(_WARM)
            for way in (self._ours, self._stock):
                await self._round(way, adapters[:1])
            if self._wanted.worker is None:
                sizes = {one.digest: one.extent.length for _, one in adapters}
                await asyncio.sleep(_PINNED_S + sum(sizes.values()) / _PINNED_RATE)
        grid = self._wanted.server or Grid({}, 0)
        for _ in range(max(1, grid.stock)):
            for n, ours in sorted(grid.ours.items()):
                found.rounds.ours.append([await self._round(self._ours, adapters[:n]) for _ in range(ours)])
            if grid.stock:
                found.rounds.stock.append(await self._round(self._stock, adapters))
        live = self._wanted.live or Live(0, 0, 0)
        for _ in range(max(1, live.stock)):
            gaps = found.gaps
            found.live.ours.append([await self._live(self._ours, adapters, gaps.ours_ms) for _ in range(live.ours)])
            if live.stock:
                found.live.stock.append(await self._live(self._stock, adapters[: live.stock_n], gaps.stock_ms))
        return found

    def _stream(self) -> TokenStream:
        host, port = self._backend.address()
        return TokenStream(f"http://{host}:{port}", self._backend.token(), self._model)

    async def _round(self, way: Way, adapters: list[tuple[str, Adapter]]) -> Round:
        begun = time.monotonic()
        names, ends = await way(adapters)
        for name in names:
            await self._client.unload(name, _LOAD_S)
        each = [round(ms, 3) for ms in intervals_ms([begun, *ends])]
        return Round(len(adapters), each, round(ends[-1] - begun, 5))

    async def _live(self, way: Way, adapters: list[tuple[str, Adapter]], gaps_ms: list[float]) -> Round:
        """Beside a stream, whose longest gap goes to ``gaps_ms``."""
        async with self._stream() as stream:
            await stream.more(_QUIET)
            quiet = intervals_ms(stream.times[_FIRST:])
            begun = time.monotonic()
            found = await self._round(way, adapters)
            await stream.more(_AFTER)
        self._found.gaps.quiet_ms.extend(round(ms, 3) for ms in quiet)
        gaps_ms.append(round(max(intervals_ms(stream.since(begun))), 3))
        return found

    async def _ours(self, named: list[tuple[str, Adapter]]) -> tuple[list[str], list[float]]:
        """All asked of the driver at once, which sends as many as the engine takes. Their names, and when each came."""

        async def install(adapter: Installable) -> float:
            await self._backend.install(adapter, _LOAD_S)
            return time.monotonic()

        adapters = [adapter.installable(tenant) for tenant, adapter in named]
        ends = await asyncio.gather(*(install(one) for one in adapters))
        return [one.adapter for one in adapters], sorted(ends)

    async def _stock(self, named: list[tuple[str, Adapter]]) -> tuple[list[str], list[float]]:
        async def load(tenant: str, adapter: Adapter) -> float:
            await self._client.load(f"stock-{tenant}", adapter.folder, _LOAD_S)
            return time.monotonic()

        ends = await asyncio.gather(*(load(*one) for one in named))
        return [f"stock-{tenant}" for tenant, _ in named], sorted(ends)


def _measuring(settings: EngineSettings) -> EngineSettings:
    extension = ("--worker-extension-cls", EXTENSION)
    return msgspec.structs.replace(
        settings, extra_args=settings.extra_args + extension, env={**settings.env, "VLLM_SERVER_DEV_MODE": "1"}
    )


async def _in_its_worker(backend: EngineBackend, measure: Measure) -> Measured:
    """The engine does nothing else meanwhile. Raises RuntimeError."""
    host, port = backend.address()
    body = {"method": MEASURE, "args": [msgspec.json.encode(measure).decode()]}
    headers = {"Authorization": f"Bearer {backend.token()}"}
    async with (
        aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=_WORKER_S)) as session,
        session.post(f"http://{host}:{port}/collective_rpc", json=body) as answer,
    ):
        if answer.status != 200:
            raise RuntimeError(f"the worker did not measure: {answer.status}: {(await answer.text())[:2000]}")
        (measured,) = (await answer.json())["results"]
        return msgspec.json.decode(measured, type=Measured)


async def _until_ready(backend: EngineBackend) -> None:
    while True:
        health = await backend.health()
        if health is Health.READY:
            await backend.limits()
            return
        if health is Health.DEAD:
            raise RuntimeError(f"the engine did not start: {backend.detail}")
        await asyncio.sleep(0.2)
