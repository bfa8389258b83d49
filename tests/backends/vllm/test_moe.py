"""Experts with adapters on vLLM's CPU build: what transformers computes, and what stock makes of a load from disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch

from backends.vllm.driver import VllmBackend
from packer.shape import BaseShape
from tests.backends.support import PROMPT, Caller, EngineStage, SharedArena, tiny_settings
from tests.models import chat_prompt, make_merged, make_tiny_base, reference_answer
from tests.packer.moe import config, folder_of, per_expert, stacked

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("gate_proj", "up_proj", "down_proj")
CASES: dict[str, dict[str, Any]] = {
    "rank 1": {"rank": 1, "alpha": 7},
    "rank 4, some targets": {"rank": 4, "alpha": 7, "targets": ("q_proj", *EXPERTS)},
    "rank 8, rsLoRA": {"rank": 8, "alpha": 3, "rslora": True},
    "attention alone": {"rank": 8, "alpha": 5, "targets": ATTENTION},
    "bf16": {"rank": 4, "alpha": 7, "dtype": torch.bfloat16},
}


class Stage(EngineStage):
    """A running engine of a base with experts. ``dtype`` is its own, ``flags`` are more of vLLM's."""

    def __init__(self, root: Path, dtype: str, flags: tuple[str, ...] = ()) -> None:
        self.root, self.dtype = root, dtype
        self.base = make_tiny_base(root / "base", arch="qwen3_moe")
        self.shape = BaseShape.from_config((self.base / "config.json").read_bytes())
        settings = tiny_settings(self.base, dtype=dtype, extra_args=flags)
        self.backend = VllmBackend(settings, run_dir=root / "run", log_dir=root / "log")
        self.arena = SharedArena(f"moe-{dtype}")

    def folder(
        self, seed: int, *, rank: int = 4, alpha: int = 8, rslora: bool = False,
        targets: tuple[str, ...] = (*ATTENTION, *EXPERTS), dtype: torch.dtype = torch.float32,
    ) -> Path:  # fmt: skip
        folder = self.root / f"adapter-{seed}"
        if not folder.exists():
            drawn = per_expert(self.shape, rank, dtype=dtype, seed=seed)
            tensors = {
                name: tensor * (0.15 if "lora_B" in name else tensor.shape[1] ** -0.5)
                for name, tensor in drawn.items()
                if any(f".{target}." in name for target in targets)
            }
            about = config(rank, lora_alpha=alpha, use_rslora=rslora, target_modules=sorted(targets))
            folder_of(folder, tensors, about)
        return folder

    async def install(self, seed: int, **about: Any) -> str:
        adapter = self.arena.put(self.folder(seed, **about), self.base)
        await self.backend.install(adapter, 30)
        return adapter.adapter


# two workers: each has a part of the attention's heads, and half of the experts
TWO_WORKERS = ("--tensor-parallel-size", "2", "--enable-expert-parallel")


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[("bfloat16",), ("float32",), ("bfloat16", TWO_WORKERS)], ids=str
)
async def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("experts"), *request.param)
    try:
        # two workers load their libraries one beside the other
        async with stage.running(240):
            yield stage
    finally:
        stage.arena.close()


@pytest_asyncio.fixture(loop_scope="module")
async def caller(stage: Stage) -> AsyncIterator[Caller]:
    async with stage.called() as caller:
        yield caller


async def test_a_router_that_an_adapter_would_not_reach_is_none_of_its_targets(stage: Stage) -> None:
    targets = (await stage.backend.limits()).targets
    assert {"q", "k", "v", "o", "experts.gate", "experts.up", "experts.gate_up", "experts.down"} == set(targets)


async def test_the_same_bits_as_a_load_from_disk(stage: Stage, caller: Caller) -> None:
    for seed, (case, about) in enumerate(CASES.items(), start=100):
        there = await stage.install(seed, **about)
        expected = await caller.probabilities(await stage.load_from_disk(seed))
        assert await caller.probabilities(there) == expected, case
        assert await caller.probabilities("tiny-base") != expected, case
        await stage.empty()


async def test_nothing_of_a_slots_former_adapter_is_left(stage: Stage, caller: Caller) -> None:
    for seed in (200, 201):
        await stage.install(seed, rank=8)
    await stage.empty()
    there = await stage.install(202, rank=2, targets=("k_proj", "o_proj"))
    found = await caller.probabilities(there)
    await stage.empty()
    assert found == await caller.probabilities(await stage.load_from_disk(202))


async def test_experts_answer_what_transformers_answers(stage: Stage, caller: Caller) -> None:
    """In float32, where no rounding makes a router choose another expert; and with an adapter that stock can't load."""
    if stage.dtype != "float32":
        pytest.skip("in bfloat16 a router may choose other experts")
    prompt = chat_prompt(stage.base, PROMPT)
    answers = {}
    for seed, targets in enumerate(((*ATTENTION, *EXPERTS), ("down_proj",), ("gate_proj", "q_proj")), start=300):
        folder = stage.folder(seed, targets=targets, alpha=16)
        merged = make_merged(stage.root / f"merged-{seed}", stage.base, folder)
        answers[await stage.install(seed)] = reference_answer(merged, None, prompt, 24)
        if len(answers) == 2:
            answers["tiny-base"] = reference_answer(stage.base, None, prompt, 24)
            assert len(set(answers.values())) == 3
            alone = {model: await caller.complete(model) for model in answers}
            together = await asyncio.gather(*(caller.complete(model) for model in answers))
            assert alone == {model: (200, text) for model, text in answers.items()}
            assert together == list(alone.values())
            await stage.empty()
            answers.clear()
    for model, text in answers.items():
        assert await caller.complete(model) == (200, text)


async def test_the_portable_path_brings_the_same_bits_of_such_experts(stage: Stage, caller: Caller) -> None:
    tensors, _ = stacked(stage.shape, 4, seed=401)
    tensors = {name: t * (0.15 if "lora_B" in name else t.shape[1] ** -0.5) for name, t in tensors.items()}
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    attention = config(4, target_modules=[*ATTENTION], target_parameters=names, peft_version="0.21.2")
    fused = folder_of(stage.root / f"stacked-{stage.dtype}", tensors, attention)
    for folder in (stage.folder(400, alpha=7, targets=("down_proj",)), fused):
        adapter = stage.arena.put(folder, stage.base)
        await stage.backend.install(adapter, 30)
        expected = await caller.probabilities(adapter.adapter)
        assert expected != await caller.probabilities("tiny-base")
        await stage.empty()
        await stage.backend.install(msgspec.structs.replace(adapter, segment=""), 30)
        assert await caller.probabilities(adapter.adapter) == expected
        await stage.empty()


async def test_experts_are_among_the_targets(stage: Stage) -> None:
    limits = await stage.backend.limits()
    assert set(limits.targets) == {
        "q", "k", "v", "o", "experts.gate", "experts.up", "experts.down", "experts.gate_up",
    }  # fmt: skip
