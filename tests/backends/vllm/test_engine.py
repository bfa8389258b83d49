"""The driver and the plug-in on a real vLLM engine, beyond what all engines promise (``contract``)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from backends.interface import Health, InstallRefused, Removal
from backends.vllm.client import VllmClient
from backends.vllm.driver import VllmBackend
from tests.backends.support import (
    PROMPT,
    Caller,
    EngineStage,
    from_bytes,
    installable,
    tiny_settings,
)
from tests.models import chat_prompt, make_adapter, make_tiny_base, reference_answer

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


class Stage(EngineStage):
    """A running engine with its driver, a caller, and adapters by seed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = make_tiny_base(root / "base")
        self.settings = tiny_settings(self.base)
        self.backend = VllmBackend(self.settings, run_dir=root / "run", log_dir=root / "log")

    def folder(self, seed: int, rank: int = 4) -> Path:
        folder = self.root / f"adapter-{seed}-{rank}"
        return folder if folder.exists() else make_adapter(folder, self.base, rank=rank, seed=seed)

    def reference(self, seed: int | None, max_tokens: int = 24) -> str:
        folder = None if seed is None else self.folder(seed)
        return reference_answer(self.base, folder, chat_prompt(self.base, PROMPT), max_tokens)

    @property
    def pid(self) -> int:
        return int(json.loads((self.root / "run" / "engines" / "tiny.json").read_bytes())["pid"])

    def told(self) -> str:
        """What other users of the host, and readers of its logs, see of the engine."""
        files = [Path(f"/proc/{self.pid}/cmdline"), *(self.root / "log").iterdir()]
        return "\n".join(file.read_text(errors="replace") for file in files)

    async def install(self, seed: int) -> str:
        adapter = installable(self.folder(seed), self.base)
        await self.backend.install(adapter, 30)
        return adapter.adapter


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with Stage(tmp_path_factory.mktemp("engine")).running() as stage:
        yield stage


@pytest_asyncio.fixture(loop_scope="module")
async def caller(stage: Stage) -> AsyncIterator[Caller]:
    async with stage.called() as caller:
        yield caller


async def test_limits_are_the_engines_own_word(stage: Stage) -> None:
    limits = await stage.backend.limits()
    assert (limits.slots, limits.max_rank, limits.dtype) == (2, 8, "float32")
    assert limits.served_base == "tiny-base"
    assert limits.removes_for_real
    assert {"q", "k", "v", "o", "gate", "up", "down"} <= set(limits.targets)


async def test_nobody_gets_in_without_the_token(stage: Stage) -> None:
    host, port = stage.backend.address()
    body = {"model": "tiny-base", "prompt": "x", "max_tokens": 1}
    async with aiohttp.ClientSession(f"http://{host}:{port}") as stranger:
        for path in ("/v1/completions", "/invocations", "/tokenize", "/v1/load_lora_adapter"):
            async with stranger.post(path, json=body) as answer:
                assert answer.status == 401, path
            async with stranger.post(path, json=body, headers={"Authorization": "Bearer wrong"}) as answer:
                assert answer.status == 401, path
        for path in ("/roost/engine", "/metrics", "/v1/models"):
            async with stranger.get(path) as answer:
                assert answer.status == 401, path
        async with stranger.get("/health") as answer:
            assert answer.status == 200
    token = stage.backend.token()
    assert token
    assert token not in stage.told()


async def test_the_base_is_nobody_elses_beside_adapters(stage: Stage, caller: Caller) -> None:
    """Asked while adapters generate, and again alone, when the prefix cache says what was computed then."""
    adapters = [await stage.install(seed) for seed in (1, 2)]
    # longer than a block of the cache, and of this test alone
    prompts = [f"{number} " + "the base is asked " * 8 for number in range(4)]
    expected = [(200, reference_answer(stage.base, None, prompt, 24)) for prompt in prompts]
    references = [stage.reference(seed, 60) for seed in (1, 2)]
    started = [asyncio.Event() for _ in adapters]
    stop = asyncio.Event()

    async def generate(adapter: str, reference: str, begun: asyncio.Event) -> None:
        while not stop.is_set():
            assert await caller.stream(adapter, 60, begun) == reference

    running = [asyncio.create_task(generate(*of)) for of in zip(adapters, references, started, strict=True)]
    await asyncio.gather(*(begun.wait() for begun in started))
    beside = await asyncio.gather(*(caller.complete("tiny-base", prompt=prompt) for prompt in prompts))
    stop.set()
    await asyncio.gather(*running)
    assert beside == expected
    assert [await caller.complete("tiny-base", prompt=prompt) for prompt in prompts] == expected


async def test_what_is_refused_costs_no_slot(stage: Stage, caller: Caller) -> None:
    too_large = installable(stage.folder(1, rank=16), stage.base)
    with pytest.raises(InstallRefused, match="rank 16 is above this engine's 8"):
        await stage.backend.install(too_large, 30)
    with pytest.raises(InstallRefused):
        await stage.backend.install(from_bytes(b"not a revision", "0" * 64, 4), 30)
    for _ in range(3):
        for broken in _broken_folders(stage):
            with pytest.raises(InstallRefused):
                await _load_past_the_packer(stage, broken)
        status, text = await caller.post(
            "/v1/load_lora_adapter", {"lora_name": "acme@nowhere", "lora_path": str(stage.root / "nowhere")}
        )
        assert status == 404, text
    assert await stage.backend.installed() == frozenset()
    adapters = [await stage.install(1), await stage.install(2)]
    assert [await caller.complete(model) for model in adapters] == [(200, stage.reference(seed)) for seed in (1, 2)]
    assert await caller.complete("tiny-base") == (200, stage.reference(None))


def _broken_folders(stage: Stage) -> list[Path]:
    """Adapters that the packer would never let through: smaller and larger than the base, of a layer or module that it
    lacks, half of a pair, of too large a rank, truncated, empty.
    """
    tensors = load_file(stage.folder(1) / "adapter_model.safetensors")
    first = "base_model.model.model.layers.0.mlp.down_proj"
    a, b = f"{first}.lora_A.weight", f"{first}.lora_B.weight"
    narrow, wide = tensors[a][:, :-8].contiguous(), torch.cat([tensors[a], tensors[a]], dim=1)
    variants = {
        "narrow": tensors | {a: narrow},
        "wide": tensors | {a: wide},
        "short": tensors | {b: tensors[b][:-8].contiguous()},
        "layer": tensors | {name.replace("layers.0", "layers.7"): tensors[name].clone() for name in (a, b)},
        "module": tensors | {name.replace("down_proj", "side_proj"): tensors[name].clone() for name in (a, b)},
        "half": {name: tensor for name, tensor in tensors.items() if name != b},
        "rank": {
            name: tensor.repeat(4, 1) if "lora_A" in name else tensor.repeat(1, 4) for name, tensor in tensors.items()
        },
    }
    folders = [_variant(stage, name, changed) for name, changed in variants.items()]
    truncated = _variant(stage, "truncated", tensors)
    with (truncated / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(2000)
    return [*folders, truncated, _variant(stage, "empty", {})]


def _variant(stage: Stage, name: str, tensors: dict[str, torch.Tensor]) -> Path:
    folder = stage.root / f"broken-{name}"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_bytes((stage.folder(1) / "adapter_config.json").read_bytes())
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


async def _load_past_the_packer(stage: Stage, folder: Path) -> None:
    client = VllmClient(*stage.backend.address(), stage.backend.token())
    try:
        await client.load(f"acme@{folder.name}", str(folder), 30)
    finally:
        await client.close()


async def test_nothing_is_loaded_in_place(stage: Stage, caller: Caller) -> None:
    adapter = await stage.install(1)
    status, text = await caller.post(
        "/v1/load_lora_adapter", {"lora_name": adapter, "lora_path": str(stage.folder(2)), "load_inplace": True}
    )
    assert (status, "in place" in text) == (500, True)
    assert await caller.complete(adapter) == (200, stage.reference(1))


async def test_an_adapter_in_use_is_busy(stage: Stage, caller: Caller) -> None:
    adapter = await stage.install(1)
    started = asyncio.Event()
    stream = asyncio.create_task(caller.stream(adapter, 200, started))
    await started.wait()
    assert await stage.backend.remove(adapter, 10) is Removal.BUSY
    report = await caller.get("/roost/engine")
    assert report["adapters"] == {adapter: 1}
    assert adapter in await stage.backend.installed()
    assert await stream == stage.reference(1, 200)
    assert await stage.backend.remove(adapter, 10) is Removal.REMOVED


async def test_removals_racing_with_requests_never_hurt_the_engine(stage: Stage, caller: Caller) -> None:
    """A request either answers exactly, or is told that its model is gone: 404 by name, 500 by id."""
    adapter = await stage.install(1)
    expected = stage.reference(1, 4)
    stop = asyncio.Event()
    statuses: set[int] = set()

    async def ask() -> None:
        while not stop.is_set():
            status, text = await caller.complete(adapter, 4)
            assert status in {200, 404, 500}, text
            assert status != 200 or text == expected
            statuses.add(status)
            await asyncio.sleep(0.01)

    askers = [asyncio.create_task(ask()) for _ in range(4)]
    removed = 0
    for turn in range(60):
        await asyncio.sleep(0.02 * (turn % 3))
        removed += await stage.backend.remove(adapter, 10) is Removal.REMOVED
        await stage.install(1)
    stop.set()
    await asyncio.gather(*askers)
    assert removed > 0
    assert 200 in statuses
    assert await stage.backend.health() is Health.READY
    assert await caller.complete(adapter) == (200, stage.reference(1))
