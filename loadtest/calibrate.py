"""Fits the engine model's constants to a real vLLM: steps, prompts, adapters coming and going, and the artifact store.

Everything is measured through what Roost uses: the engine's driver, the arena, the artifact store. What an adapter
takes of the engine's own time is what a stream beside it loses; what is left of the call's time is done beside the
steps. At the end the model is asked to repeat a run that no constant was fitted to.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from backends.interface import EngineBackend, EngineSettings, Health, Installable
from backends.registry import make_backend
from backends.vllm.client import VllmClient
from catalog.artifacts import OWN_FOLDER, open_store
from catalog.blobs import BlobStore
from catalog.names import adapter_name
from packer.peft import pack_peft
from packer.shape import BaseShape
from sidecar.arena import Arena
from sidecar.extents import HEADER_BYTES, Extent, block_bytes
from wire.outcomes import EngineFailed

from .base_model import PLAIN_TOKENS, BaseSize, write_base
from .deployment import BASE
from .generator import Generator, Sample, completion
from .held_out import CHECK_PROMPT, CHECK_SEQUENCES, CHECK_TOKENS, LEAD_S, SHORT, SLOTS, model_over_real
from .pack import write_adapter
from .report import environment, write_report
from .simulate.backend import CALL_S
from .simulate.constants import EngineConstants

_SEQUENCES = (1, 2, 4, 8, 16)
_PROMPTS = (16, 128, 512)
_FEW, _TOKENS = 2, 32
# a stream beside calls is hung up on when they are done
_CONTEXT, _STREAM_TOKENS = 8192, 8000


def run(file: Path, *, small: bool, seed: int, size: BaseSize, say: Callable[[str], object]) -> dict[str, Any]:
    """Measure, fit and write; returns the summary."""
    with tempfile.TemporaryDirectory(prefix="roost-loadtest-") as scratch:
        root = Path(scratch)
        say("making a base and adapters of it")
        base = write_base(root / "base", msgspec.structs.replace(size, context=_CONTEXT), seed)
        adapters = _Adapters(root, base, SLOTS, seed)
        try:
            samples = asyncio.run(_Session(root, base, adapters, rounds=3 if small else 9, say=say, seed=seed).run())
        finally:
            adapters.close()
    constants = fit(samples, adapters.size)
    summary: dict[str, Any] = {
        name: float(f"{value:.4g}") for name, value in msgspec.to_builtins(constants).items()
    } | model_over_real(constants, samples)
    told = {"base": msgspec.to_builtins(size), "slots": SLOTS}
    where = environment(seed=seed, engine="vllm", stand_in=None) | told
    write_report(file, where, {**samples, "constants": msgspec.to_builtins(constants)}, summary)
    return summary


def fit(samples: dict[str, Any], adapter_bytes: int) -> EngineConstants:
    """The constants that explain ``samples`` best; what came out below 0 was within the noise, and is 0.

    Of what was timed several times the fastest counts, which other work on the machine disturbed least.
    """
    step_s, sequence_s = _line(_intervals(samples["tokens_s"]))
    adapters_s, with_adapter_s = _line(_intervals(samples["adapters_tokens_s"]))
    first_s, prefill_s = _fastest(samples["first_token_s"])
    _, token_s = _fastest(samples["adapter_first_token_s"])
    _, more_s = _fastest(samples["at_once_s"])
    _, more_with_adapter_s = _fastest(samples["adapters_at_once_s"])
    fetch_s, fetch_byte_s = _fastest(samples["fetch_s"])
    call_s = min(samples["install_call_s"])
    adapter_s = max(0.0, with_adapter_s - sequence_s)
    adapter_prefill_s = max(0.0, token_s - prefill_s)
    # an engine can't lose more to a call than the call took
    install_s = min(call_s, max(0.0, statistics.median(samples["install_stall_s"])))
    found = {
        "step_s": step_s, "sequence_s": sequence_s, "prefill_s": prefill_s, "adapters_s": adapters_s - step_s,
        "adapter_s": adapter_s, "adapter_prefill_s": adapter_prefill_s,
        "adapter_prompt_s": more_with_adapter_s - more_s - adapter_s - SHORT * adapter_prefill_s,
        "request_s": first_s - step_s - sequence_s, "front_s": more_s - sequence_s - SHORT * prefill_s,
        "install_s": install_s, "install_byte_s": 0.0, "prepare_s": call_s - install_s - CALL_S,
        "remove_s": min(samples["remove_call_s"]) - CALL_S,
        "stock_install_s": min(min(samples["stock_call_s"]), statistics.median(samples["stock_stall_s"])),
        "fetch_s": fetch_s, "fetch_byte_s": fetch_byte_s, "start_s": samples["start_s"],
    }  # fmt: skip
    return EngineConstants(adapter_bytes=adapter_bytes, **{name: max(0.0, value) for name, value in found.items()})


def _intervals(found: Sequence[tuple[float, Sequence[float], Sequence[float]]]) -> list[tuple[float, float]]:
    """Seconds between two tokens of so many sequences: what more tokens take more, over their number.

    Ends alone count: on a busy machine tokens come in lumps.
    """
    return [(count, (min(many) - min(few)) / _TOKENS) for count, few, many in found]


def _fastest(found: Sequence[tuple[float, Sequence[float]]]) -> tuple[float, float]:
    return _line([(place, min(seconds)) for place, seconds in found])


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of the least squares line, neither below 0: what is fitted are times."""
    places, values = np.array(points, dtype=float).T
    slope, intercept = np.polyfit(places, values, 1)
    if intercept < 0:
        return 0.0, float((places @ values) / (places @ places))
    return (float(intercept), float(slope)) if slope > 0 else (float(values.mean()), 0.0)


class _Adapters:
    """Random adapters in the arena, each in an extent of its own, and as the PEFT folders that they were."""

    def __init__(self, root: Path, base: Path, count: int, seed: int) -> None:
        shape = BaseShape.from_config((base / "config.json").read_bytes())
        self.folders: list[Path] = []
        self.installables: list[Installable] = []
        packed = []
        for number in range(count):
            folder = root / f"raw-{number}"
            write_adapter(folder, shape, seed + number)
            out = root / f"packed-{number}"
            with out.open("wb") as file:
                facts = pack_peft(folder, shape, file)
            packed.append((out.read_bytes(), facts))
            self.folders.append(folder)
        self.size = len(packed[0][0])
        room = block_bytes(self.size)
        self._arena = Arena(f"roost-calibrate-{time.time_ns()}", room * count)
        for number, (data, facts) in enumerate(packed):
            extent = Extent(number * room + HEADER_BYTES, len(data), number + 1)
            with self._arena.begin(extent) as view:
                view[:] = data
            self._arena.seal(extent, facts.digest)
            self.installables.append(self._installable(extent, facts.digest, facts.rank))

    def _installable(self, extent: Extent, digest: str, rank: int) -> Installable:
        return Installable(
            adapter=adapter_name("bench", digest), digest=digest, rank=rank, segment=self._arena.segment,
            offset=extent.offset, length=extent.length, generation=extent.generation,
            view=lambda: self._arena.read(extent),
        )  # fmt: skip

    def close(self) -> None:
        self._arena.close()


class _Session:
    """One engine, from its start to its end."""

    def __init__(
        self, root: Path, base: Path, adapters: _Adapters, *, rounds: int, say: Callable[[str], object], seed: int
    ) -> None:
        settings = EngineSettings(
            name="calibrated", base=BASE, model_path=str(base), fingerprint="f" * 64, slots=SLOTS, max_rank=1,
            dtype="float32", max_num_seqs=64, extra_args=("--no-enable-prefix-caching",),
        )  # fmt: skip
        self._root = root
        self._adapters = adapters
        self._rounds = rounds
        self._say = say
        self._chance = np.random.default_rng(seed)
        self._backend: EngineBackend = make_backend(settings, run_dir=root / "run", log_dir=root / "log")

    async def run(self) -> dict[str, Any]:
        self._say("starting the engine")
        started = time.monotonic()
        await self._backend.start()
        try:
            await self._until_ready()
            samples: dict[str, Any] = {"start_s": time.monotonic() - started}
            host, port = self._backend.address()
            self._generator = Generator(host, port)
            await self._measure(samples)
            self._generator.close()
        finally:
            await self._backend.stop()
        self._say("the artifact store")
        samples["fetch_s"] = await asyncio.to_thread(self._fetches)
        return samples

    async def _until_ready(self) -> None:
        while (health := await self._backend.health()) is not Health.READY:
            if health is Health.DEAD:
                raise EngineFailed(f"the engine did not start: {self._backend.detail}")
            await asyncio.sleep(0.2)
        await self._backend.limits()

    async def _measure(self, samples: dict[str, Any]) -> None:
        await self._batch([BASE] * 4, 64)
        self._say("steps and prompts")
        samples["tokens_s"] = [await self._tokens([BASE] * count) for count in _SEQUENCES]
        samples["first_token_s"] = [(length, await self._first_tokens(BASE, length)) for length in _PROMPTS]
        samples["at_once_s"] = [(count, await self._first_of([BASE] * count)) for count in _SEQUENCES]
        self._say("adapters in a batch")
        names = [adapter.adapter for adapter in self._adapters.installables]
        samples["install_call_s"] = [await self._installed(adapter) for adapter in self._adapters.installables]
        await self._batch(names, SHORT)
        samples["adapters_tokens_s"] = [await self._tokens(names[:count]) for count in _SEQUENCES]
        samples["adapter_first_token_s"] = [(length, await self._first_tokens(names[0], length)) for length in _PROMPTS]
        samples["adapters_at_once_s"] = [(count, await self._first_of(names[:count])) for count in _SEQUENCES]
        check = [names[place % SLOTS] for place in range(CHECK_SEQUENCES)]
        samples["check_s"] = [await self._last_of(check, CHECK_PROMPT, CHECK_TOKENS) for _ in range(self._rounds)]
        for name in names:
            await self._backend.remove(name, 120.0)
        samples["loads_check_s"] = [await self._loaded_at_once() for _ in range(self._rounds)]
        await self._coming_and_going(samples)

    async def _coming_and_going(self, samples: dict[str, Any]) -> None:
        """All adapters one after another, ours and stock: what a call takes, and what a stream loses to it."""
        self._say("adapters coming and going")
        host, port = self._backend.address()
        stock = VllmClient(host, port, self._backend.token())
        named = list(zip(self._adapters.installables, self._adapters.folders, strict=True))
        found: dict[str, list[float]] = {
            name: [] for name in ("remove_call_s", "stock_call_s", "install_stall_s", "stock_stall_s")
        }

        async def timed(name: str, call: Awaitable[object]) -> None:
            begun = time.monotonic()
            await call
            found[name].append(time.monotonic() - begun)

        async def install() -> None:
            for adapter, _ in named:
                await self._backend.install(adapter, 120.0)

        async def load() -> None:
            for place, (_, folder) in enumerate(named):
                await timed("stock_call_s", stock.load(f"stock-{place}", str(folder), 120.0))

        for _ in range(self._rounds):
            found["install_stall_s"].append(await self._stalled_by(install) / len(named))
            for adapter, _ in named:
                await timed("remove_call_s", self._backend.remove(adapter.adapter, 120.0))
            found["stock_stall_s"].append(await self._stalled_by(load) / len(named))
            for place in range(len(named)):
                await stock.unload(f"stock-{place}", 120.0)
        await stock.close()
        samples.update(found)

    async def _installed(self, adapter: Installable) -> float:
        begun = time.monotonic()
        await self._backend.install(adapter, 120.0)
        return time.monotonic() - begun

    async def _loaded_at_once(self) -> tuple[float, float]:
        """Seconds for all adapters, asked for at once, beside a stream, and what the stream loses to them."""
        loaded = self._adapters.installables

        async def load() -> None:
            await asyncio.gather(*(self._backend.install(adapter, 120.0) for adapter in loaded))

        request = completion(BASE, prompt=self._prompt(SHORT), tokens=_STREAM_TOKENS, token=self._backend.token())
        beside = await self._generator.beside(request, load, LEAD_S)
        for adapter in loaded:
            await self._backend.remove(adapter.adapter, 120.0)
        return beside.until - beside.since, beside.stalled_s

    async def _stalled_by(self, work: Callable[[], Awaitable[None]]) -> float:
        request = completion(BASE, prompt=self._prompt(SHORT), tokens=_STREAM_TOKENS, token=self._backend.token())
        return (await self._generator.beside(request, work, LEAD_S)).stalled_s

    async def _tokens(self, models: Sequence[str]) -> tuple[int, list[float], list[float]]:
        """Seconds that few tokens take, and many, while all of ``models`` decode."""
        few, many = [], []
        for _ in range(self._rounds):
            few.append(await self._last_of(models, SHORT, _FEW))
            many.append(await self._last_of(models, SHORT, _FEW + _TOKENS))
        return len(models), few, many

    async def _first_tokens(self, model: str, length: int) -> list[float]:
        return [await self._last_of([model], length, 1) for _ in range(3 * self._rounds)]

    async def _first_of(self, models: Sequence[str]) -> list[float]:
        return [await self._last_of(models, SHORT, 1) for _ in range(self._rounds)]

    async def _last_of(self, models: Sequence[str], length: int, tokens: int) -> float:
        """Seconds until the last of ``models`` has had all its tokens."""
        samples = await self._batch(models, length, tokens)
        return max(one.done - one.intended for one in samples)

    async def _batch(self, models: Sequence[str], length: int, tokens: int = 8) -> list[Sample]:
        """Ask all at once, each with a prompt of its own."""
        token = self._backend.token()
        requests = [completion(model, prompt=self._prompt(length), tokens=tokens, token=token) for model in models]
        samples = await self._generator.at_once(requests)
        failed = next((one for one in samples if one.status != 200), None)
        if failed is not None:
            raise EngineFailed(f"the engine answered {failed.status}: {failed.text}")
        return samples

    def _prompt(self, length: int) -> list[int]:
        return [int(token) for token in self._chance.integers(0, PLAIN_TOKENS, length)]

    def _fetches(self) -> list[tuple[int, list[float]]]:
        """Seconds to bring artifacts of three sizes from a store on this disk into memory, verified."""
        blobs = BlobStore(self._root / "store")
        store = open_store(self._root / "store", OWN_FOLDER)
        found = []
        for length in (4096, max(8192, self._adapters.size), 1 << 24):
            with blobs.writer() as writer:
                writer.write(self._chance.bytes(length))
                digest = writer.commit().digest
            memory = memoryview(bytearray(length))
            seconds = []
            for _ in range(5 * self._rounds):
                begun = time.perf_counter()
                with store.open(digest) as source:
                    source.fill(memory, lambda: False)
                seconds.append(time.perf_counter() - begun)
            found.append((length, seconds))
        return found
