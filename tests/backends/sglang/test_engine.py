"""SGLang with our additions, on a base with experts: its answers are PEFT's, and what ends a stock server is refused.

Computed by our stand-in for experts on CPU; the loader, the memory pool and the arena's way into it are the real ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from backends.extent_path import extent_of
from backends.interface import Health, InstallFailed, InstallRefused, Removal
from backends.registry import make_backend
from gateway.training.work import Sample
from packer.shape import BaseShape
from tests.backends.support import PROMPT, EngineStage, SharedArena, installable, tiny_settings
from tests.models import chat_prompt, make_merged, make_tiny_base, reference_answer
from tests.packer.moe import config, folder_of, per_expert

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("gate_proj", "up_proj", "down_proj")
SLOTS, MAX_RANK = 2, 8
CASES: dict[str, dict[str, Any]] = {
    "all modules": {"rank": 4, "lora_alpha": 8},
    "the largest rank, rsLoRA": {"rank": 8, "lora_alpha": 3, "use_rslora": True},
    "alphas that differ": {"rank": 4, "lora_alpha": 8, "alpha_pattern": {"q_proj": 3, "up_proj": 5}},
    "parts of groups": {"rank": 4, "lora_alpha": 7, "targets": ("k_proj", "up_proj", "gate_proj", "down_proj")},
    "attention alone": {"rank": 1, "lora_alpha": 7, "targets": ("o_proj", "v_proj")},
}


class Stage(EngineStage):
    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = make_tiny_base(root / "base", arch="qwen3_moe")
        self.shape = BaseShape.from_config((self.base / "config.json").read_bytes())
        settings = tiny_settings(
            self.base, backend="sglang", slots=SLOTS, max_rank=MAX_RANK, extra_args=("--enable-cache-report",)
        )
        self.backend = make_backend(settings, run_dir=root / "run", log_dir=root / "log")
        self.arena = SharedArena("sglang-experts")

    def folder(self, seed: int, **about: Any) -> Path:
        folder = self.root / f"adapter-{seed}"
        targets, rank = about.pop("targets", (*ATTENTION, *EXPERTS)), about.pop("rank", 4)
        if not folder.exists():
            tensors = {
                name: tensor * (0.15 if "lora_B" in name else tensor.shape[1] ** -0.5)
                for name, tensor in per_expert(self.shape, rank, dtype=torch.float32, seed=seed).items()
                if any(f".{target}." in name for target in targets)
            }
            folder_of(folder, tensors, config(rank, target_modules=sorted(targets), **about))
        return folder

    def reference(self, folder: Path | None) -> str:
        """By transformers, whose experts PEFT can't change one by one: with the products added to the weights."""
        merged = self.base if folder is None else folder.with_suffix(".merged")
        if folder is not None and not merged.exists():
            make_merged(merged, self.base, folder)
        return reference_answer(merged, None, chat_prompt(self.base, PROMPT), 24)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("sglang"))
    try:
        async with stage.running(480):
            yield stage
    finally:
        stage.arena.close()


async def test_it_says_what_it_can_do(stage: Stage) -> None:
    limits = await stage.backend.limits()
    assert (limits.slots, limits.max_rank, limits.dtype) == (SLOTS, MAX_RANK, "float32")
    assert limits.removes_for_real
    assert limits.serves_base
    # the adapters of these tests, and none of a dense layer's MLP
    assert {"q", "k", "v", "o", "experts.gate", "experts.up", "experts.gate_up", "experts.down"} == set(limits.targets)


@pytest.mark.parametrize("way", ["folder", "arena"])
@pytest.mark.parametrize("case", CASES)
async def test_answers_are_those_of_peft(stage: Stage, case: str, way: str) -> None:
    folder = stage.folder(list(CASES).index(case), **CASES[case])
    adapter = stage.arena.put(folder, stage.base) if way == "arena" else installable(folder, stage.base)
    async with stage.called() as caller:
        await stage.backend.install(adapter, 60)
        answers = await asyncio.gather(caller.complete(adapter.adapter), caller.complete("tiny-base"))
    assert answers == [(200, stage.reference(folder)), (200, stage.reference(None))]


async def test_a_slot_holds_nothing_of_its_last_adapter(stage: Stage) -> None:
    everything, little = stage.folder(0, **CASES["all modules"]), stage.folder(4, **CASES["attention alone"])
    async with stage.called() as caller:
        for folder in (everything, little, everything, little):
            adapter = stage.arena.put(folder, stage.base)
            await stage.backend.install(adapter, 60)
            assert await caller.complete(adapter.adapter) == (200, stage.reference(folder))
            assert await stage.backend.remove(adapter.adapter, 10) is Removal.REMOVED


async def test_a_load_past_the_slots_is_refused_and_evicts_nothing(stage: Stage) -> None:
    async with stage.called() as caller:
        served = [
            stage.arena.put(stage.folder(0, **CASES["all modules"]), stage.base, tenant=f"t{n}") for n in range(3)
        ]
        for adapter in served[:SLOTS]:
            await stage.backend.install(adapter, 60)
        with pytest.raises(InstallFailed, match="no free slot"):
            await stage.backend.install(served[SLOTS], 60)
        assert await stage.backend.installed() == {adapter.adapter for adapter in served[:SLOTS]}
        for adapter in served[:SLOTS]:
            assert (await caller.complete(adapter.adapter))[0] == 200


@pytest.mark.parametrize("way", ["folder", "arena"])
async def test_a_load_that_is_asked_for_while_it_is_under_way_takes_one_slot(stage: Stage, way: str) -> None:
    """As by a driver that had no answer in time: both calls pass the server's look before either is through."""
    folders = [stage.folder(0, **CASES["all modules"]), stage.folder(4, **CASES["attention alone"])]
    first, second = (stage.arena.put(folder, stage.base) for folder in folders)
    call = {"lora_name": first.adapter, "lora_path": str(folders[0] if way == "folder" else extent_of(first))}
    async with stage.called() as caller:
        told = await asyncio.gather(*(caller.post("/load_lora_adapter", call) for _ in range(3)))
        assert all(status == 200 or "already exists" in text for status, text in told), told
        await stage.backend.install(second, 60)
        answers = [await caller.complete(one.adapter) for one in (first, second)]
    assert answers == [(200, stage.reference(folder)) for folder in folders]


async def test_a_removal_while_a_request_names_it_is_busy_and_revokes_afterwards(stage: Stage) -> None:
    adapter = stage.arena.put(stage.folder(0, **CASES["all modules"]), stage.base)
    async with stage.called() as caller:
        await stage.backend.install(adapter, 60)
        started = asyncio.Event()
        stream = asyncio.create_task(caller.stream(adapter.adapter, 200, started))
        await started.wait()
        assert await stage.backend.remove(adapter.adapter, 10) is Removal.BUSY
        assert len(await stream) > 24
        assert await stage.backend.remove(adapter.adapter, 10) is Removal.REMOVED
        assert (await caller.complete(adapter.adapter))[0] == 404
        assert await stage.backend.remove(adapter.adapter, 10) is Removal.ABSENT
        assert await stage.backend.installed() == frozenset()


async def test_what_the_prefix_cache_has_of_an_adapter_is_its_own_after_a_reload(stage: Stage) -> None:
    adapter = stage.arena.put(stage.folder(0, **CASES["all modules"]), stage.base)
    prompt = "a long beginning that is said again and again: " * 2
    async with stage.called() as caller:
        await stage.backend.install(adapter, 60)
        before = await caller.complete(adapter.adapter, prompt=prompt)
        assert await stage.backend.remove(adapter.adapter, 10) is Removal.REMOVED
        await stage.backend.install(adapter, 60)
        assert await caller.cached_tokens(adapter.adapter, prompt) > len(prompt) // 2
        assert await caller.complete(adapter.adapter, prompt=prompt) == before


async def test_a_name_that_it_has_not_is_not_answered_from_the_base(stage: Stage) -> None:
    async with stage.called() as caller:
        for body in (
            {"model": "anything"},
            {"model": "tiny-base", "lora_path": "nobody"},
            {"model": "tiny-base", "lora_path": [None, "nobody"]},
            {"model": "tiny-base:"},
        ):
            status, _ = await caller.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, **body})
            assert status == 404, body
        status, _ = await caller.post("/generate", {"text": PROMPT, "lora_path": "nobody"})
        assert status == 400


async def test_a_last_message_stays_its_authors(stage: Stage) -> None:
    said = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "hh"}]
    body = {"model": "tiny-base", "messages": said, "max_tokens": 8, "temperature": 0}
    async with stage.called() as caller:
        status, told = await caller.post("/v1/chat/completions", body)
    assert status == 200, told
    prompt = f"user: {PROMPT}\nassistant: hh\nassistant: "
    assert json.loads(told)["choices"][0]["message"]["content"] == reference_answer(stage.base, None, prompt, 8)


async def test_parameters_on_which_a_scheduler_would_end_do_not_reach_it(stage: Stage) -> None:
    sample = Sample(prompt=(1, 2, 3), max_tokens=4)
    bad = ({"stop_token_ids": [10**6], "min_tokens": 2}, {"logit_bias": {"5": "x"}}, {"stop": [5]})
    large = ({"top_k": 1 << 40}, {"logit_bias": {"5": 1e39}})
    async with stage.called() as caller:
        for expected, cases in ((400, bad), (200, large)):
            for changes in cases:
                status, told = await caller.asked("tiny-base", sample, **changes)
                assert status == expected, (changes, told)
        # the gateway refuses these before
        for prompt in ({"text": ""}, {"text": ["x", ""]}, {"input_ids": []}, {"input_ids": [[1], []]}):
            many = isinstance(next(iter(prompt.values())), list) and prompt != {"input_ids": []}
            few = {"max_new_tokens": 2}
            body = prompt | {"sampling_params": [few, few] if many else few, "return_logprob": True}
            assert (await caller.post("/generate", body))[0] == 400, prompt
        chat = {"model": "tiny-base", "messages": [{"role": "user", "content": PROMPT}], "min_tokens": 1 << 40}
        assert (await caller.post("/v1/chat/completions", chat))[0] == 400
        assert await caller.complete("tiny-base") == (200, stage.reference(None))
    assert await stage.backend.health() is Health.READY


async def test_only_who_has_the_token_gets_in(stage: Stage) -> None:
    async with stage.called() as caller, aiohttp.ClientSession(caller.url) as stranger:
        for path in ("/v1/models", "/server_info", "/metrics", "/health_generate", "/generate"):
            async with stranger.get(path) as answer:
                assert answer.status == 401, path
        async with stranger.get("/health") as answer:
            assert answer.status == 200


def spoilt(stage: Stage, how: str) -> Path:
    """An adapter on which a stock server ends at its first request."""
    source = stage.folder(0, **CASES["all modules"])
    tensors, about = (
        load_file(source / "adapter_model.safetensors"),
        json.loads((source / "adapter_config.json").read_text()),
    )
    if how == "a wrong shape":
        name = next(name for name in tensors if "o_proj.lora_A" in name)
        tensors[name] = tensors[name][:, :-1].contiguous()
    elif how == "another rank than it says":
        about["r"] = 2
    elif how == "k without q":
        tensors = {name: tensor for name, tensor in tensors.items() if "k_proj" in name}
    elif how == "experts as PEFT stacks them":
        tensors = {
            f"base_model.model.model.layers.0.mlp.experts.lora_{factor}.weight": torch.zeros(16, 16) for factor in "AB"
        }
    folder = stage.root / how.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize(
    "how", ["a wrong shape", "another rank than it says", "k without q", "experts as PEFT stacks them"]
)
async def test_what_ends_a_stock_server_is_refused_by_ours(stage: Stage, how: str) -> None:
    good = stage.arena.put(stage.folder(1, **CASES["the largest rank, rsLoRA"]), stage.base)
    async with stage.called() as caller:
        await stage.backend.install(good, 60)
        call = {"lora_name": "spoilt", "lora_path": str(spoilt(stage, how))}
        status, told = await caller.post("/load_lora_adapter", call)
        assert status == 400, told
        assert (await caller.complete("spoilt"))[0] == 404
        assert await stage.backend.installed() == {good.adapter}
        expected = stage.reference(stage.folder(1, **CASES["the largest rank, rsLoRA"]))
        assert await caller.complete(good.adapter) == (200, expected)
    assert await stage.backend.health() is Health.READY


async def test_tensors_in_a_call_are_not_taken(stage: Stage) -> None:
    async with stage.called() as caller:
        call = {
            "lora_name": "x",
            "config_dict": {},
            "serialized_named_tensors": ["AA=="],
            "expected_checksums": {"a": "b"},
        }
        status, _ = await caller.post("/load_lora_adapter_from_tensors", call)
        assert status == 400
    assert await stage.backend.health() is Health.READY


async def test_an_extent_that_was_given_away_is_not_loaded(stage: Stage) -> None:
    adapter = stage.arena.put(stage.folder(0, **CASES["all modules"]), stage.base)
    stage.arena.give_away(adapter)
    async with stage.called() as caller:
        call = {"lora_name": adapter.adapter, "lora_path": str(extent_of(adapter))}
        status, told = await caller.post("/load_lora_adapter", call)
        assert status == 400
        assert "was given away" in told
        assert await stage.backend.installed() == frozenset()


async def test_a_rank_above_the_engines_is_refused(stage: Stage) -> None:
    adapter = stage.arena.put(stage.folder(9, rank=16, lora_alpha=8), stage.base)
    with pytest.raises(InstallRefused, match="rank 16 is above this engine's 8"):
        await stage.backend.install(adapter, 60)
