"""Adapters of real models at their real dimensions, in the layouts people train: packed and given back bit for bit.

All layers where the adapter is a few hundred megabytes at the most. The largest models have here as many layers as
it takes to have one of each kind; all of them with the full counts.
"""

from __future__ import annotations

import filecmp
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from packer.formats import pack_adapter
from packer.peft import TENSORS_NAME
from packer.revision import RevisionFile
from packer.shape import BaseShape
from packer.unpack import write_peft
from tests.packer import published
from tests.packer.moe import config, folder_of, outer, per_expert, stacked
from tests.packer.test_megatron_core import Groups, trained

_PARAMETERS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "peft_version": "0.21.2"}
QWEN3_MOE, MIXTRAL = "Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-Instruct-v0.1"
MOONLIGHT, KIMI = "moonshotai/Moonlight-16B-A3B", "moonshotai/Kimi-K2-Instruct"
DEEPSEEK, GLM = "deepseek-ai/DeepSeek-V3", "zai-org/GLM-5"

# model, layout, rank, layers (0 for all)
CASES: list[Any] = [
    ("meta-llama/Llama-3.1-8B-Instruct", "per expert", 16, 0),
    ("Qwen/Qwen2.5-7B-Instruct", "per expert", 16, 0),
    ("Qwen/Qwen3-8B", "per expert", 16, 0),
    (QWEN3_MOE, "per expert", 1, 0),
    (QWEN3_MOE, "stacked", 2, 0),
    (QWEN3_MOE, "by block", 2, 0),
    (QWEN3_MOE, "shared outer", 2, 0),
    (MIXTRAL, "per expert", 4, 0),
    (MIXTRAL, "shared outer", 4, 0),
    (MOONLIGHT, "per expert", 1, 0),
    (MOONLIGHT, "shared outer", 2, 0),
    ("openai/gpt-oss-20b", "stacked", 2, 0),
    (DEEPSEEK, "per expert", 2, 4),
    (KIMI, "per expert", 2, 2),
    (GLM, "per expert", 2, 4),
    ("openai/gpt-oss-120b", "stacked", 2, 4),
    *[
        pytest.param(model, layout, 1, 0, marks=pytest.mark.soak)
        for model, layout in (
            (DEEPSEEK, "per expert"), (KIMI, "per expert"), (GLM, "per expert"), ("openai/gpt-oss-120b", "stacked"),
        )
    ],
]  # fmt: skip
JOBS = [
    ("meta-llama/Llama-3.1-8B-Instruct", 16, 0, Groups(8, tensor=8)),
    (QWEN3_MOE, 1, 0, Groups(8, tensor=2, expert=8)),
    (MIXTRAL, 4, 0, Groups(16, tensor=2, expert=4, expert_tensor=2, pipeline=2)),
    (DEEPSEEK, 2, 4, Groups(8, tensor=4, expert=8, engine=False)),
    (KIMI, 2, 2, Groups(8, tensor=4, expert=8)),
    (GLM, 2, 4, Groups(8, tensor=4, expert=2, expert_tensor=4)),
]


def settings_of(model: str, layers: int) -> dict[str, Any]:
    return {**published.CONFIGS[model], **({"num_hidden_layers": layers} if layers else {})}


def shape_of(settings: dict[str, Any]) -> BaseShape:
    return BaseShape.from_config(json.dumps(settings).encode())


def write(folder: Path, shape: BaseShape, layout: str, rank: int) -> Path:
    if layout in ("stacked", "by block"):
        tensors, _ = stacked(shape, rank, block=layout == "by block")
        order = _PARAMETERS if layout == "stacked" else {"expert_order": "block"}
        return folder_of(folder, tensors, config(rank, **order))
    tensors = outer(shape, rank) if layout == "shared outer" else per_expert(shape, rank)
    return folder_of(folder, tensors, config(rank))


@pytest.mark.parametrize(("model", "layout", "rank", "layers"), CASES)
def test_a_real_model_there_and_back(model: str, layout: str, rank: int, layers: int, tmp_path: Path) -> None:
    shape = shape_of(settings_of(model, layers))
    folder = write(tmp_path / "raw", shape, layout, rank)
    with (tmp_path / "packed").open("wb") as out:
        facts = pack_adapter(folder, shape, out)
    file = RevisionFile.open(tmp_path / "packed")
    assert file.facts() == facts
    write_peft(file.buffer, tmp_path / "back")
    assert filecmp.cmp(folder / TENSORS_NAME, tmp_path / "back" / TENSORS_NAME, shallow=False)
    with (tmp_path / "again").open("wb") as out:
        assert pack_adapter(tmp_path / "back", shape, out) == facts


@pytest.mark.parametrize(("model", "rank", "layers", "groups"), JOBS)
def test_a_real_job_gives_the_whole(model: str, rank: int, layers: int, groups: Groups, tmp_path: Path) -> None:
    settings = settings_of(model, layers)
    shape = shape_of(settings)
    tensors = per_expert(shape, rank, dtype=torch.bfloat16)
    whole, merged = io.BytesIO(), io.BytesIO()
    pack_adapter(folder_of(tmp_path / "whole", tensors, config(rank)), shape, whole)
    pack_adapter(trained(tmp_path / "shards", tensors, settings, groups, config(rank)), shape, merged)
    assert merged.getbuffer() == whole.getbuffer()
