"""Shards of a Megatron trainer give the very revision that the whole adapter gives."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from packer.formats import pack_adapter
from packer.inspect import inspect
from tests.packer.adapters import Tensors, packed
from tests.packer.moe import base, config, folder_of, per_expert
from wire.outcomes import InvalidRequest, RoostError, Unfit

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj", "eh_proj", "w1", "w3")
ROW = ("o_proj", "down_proj", "w2")
TOPOLOGIES = [(1, 1, 1, 1), (2, 1, 1, 2), (1, 4, 1, 1), (2, 2, 3, 1), (2, 2, 1, 2), (1, 1, 3, 1)]


def part(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What one rank of tensor parallelism has of a tensor."""
    stem, _, factor = name.rpartition(".lora_")
    module = stem.rpartition(".")[2]
    if module in COLUMN and factor == "B.weight":
        return tensor.chunk(ranks, 0)[rank].contiguous()
    if module in ROW and factor == "A.weight":
        return tensor.chunk(ranks, 1)[rank].contiguous()
    return tensor.clone()


def shards(
    folder: Path, tensors: Tensors, groups: tuple[int, int, int, int], experts: int = 4, layers: int = 4
) -> Path:
    """Write an adapter as (tensor, expert, pipeline, expert_tensor) ranks would."""
    tensor_ranks, expert_ranks, stages, expert_tensor = groups
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config()))
    body = {
        "format": "megatron-lora-shards", "version": 1, "tensor": tensor_ranks, "expert": expert_ranks,
        "pipeline": stages, "expert_tensor": expert_tensor,
    }  # fmt: skip
    (folder / "megatron.json").write_text(json.dumps(body))
    for stage in range(stages):
        for owner in range(expert_ranks):
            for rank in range(tensor_ranks):
                own = {}
                for name, tensor in tensors.items():
                    layer = int(name.split(".layers.")[1].split(".")[0])
                    if layer * stages // 4 != stage:
                        continue
                    if ".experts." not in name:
                        own[name] = part(name, tensor, rank, tensor_ranks)
                    elif int(name.split(".experts.")[1].split(".")[0]) * expert_ranks // 4 == owner:
                        own[name] = part(name, tensor, rank, tensor_ranks) if expert_tensor > 1 else tensor.clone()
                save_file(own, folder / f"adapter-tp{rank}-ep{owner}-pp{stage}.safetensors")
    return folder


def merged(folder: Path, name: str) -> bytes:
    out = io.BytesIO()
    pack_adapter(folder, base(name), out)
    return out.getvalue()


@pytest.mark.parametrize("name", ["Qwen3-MoE", "DeepSeek-V3", "GLM-5", "Mixtral", "Qwen3"])
@pytest.mark.parametrize("groups", TOPOLOGIES)
def test_every_topology_gives_the_whole(name: str, groups: tuple[int, int, int, int], tmp_path: Path) -> None:
    tensors = per_expert(base(name))
    whole = packed(folder_of(tmp_path / "whole", tensors, config()), base(name))
    assert merged(shards(tmp_path / "shards", tensors, groups), name) == whole
    out = io.BytesIO()
    pack_adapter(tmp_path / "whole", base(name), out)
    assert out.getvalue() == whole


def test_shards_are_inspected(tmp_path: Path) -> None:
    folder = shards(tmp_path / "s", per_expert(base("Qwen3-MoE")), (2, 2, 1, 2))
    seen = inspect(folder, base("Qwen3-MoE"))
    assert (seen.kind, seen.refusal) == ("Megatron shards", "")
    assert seen.facts is not None
    assert inspect(folder).facts == seen.facts
    (folder / "adapter-tp1-ep0-pp0.safetensors").unlink()
    assert "no readable adapter-tp1-ep0-pp0" in inspect(folder).refusal


def edit(folder: Path, file: str, change: Any) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


ROUTER = "base_model.model.model.layers.0.mlp.gate.lora_A.weight"
UP = "base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        (lambda t: t.update({ROUTER: t[ROUTER] + 1}), InvalidRequest, "gate.lora_A.* is not the same in"),
        (lambda t: t.pop(UP), InvalidRequest, "up_proj.lora_B.* has no part of tensor rank 1"),
        (lambda t: t.update({UP: t[UP][:1].clone()}), InvalidRequest, "parts of unlike shape"),
        (lambda t: t.update({"x": torch.zeros(1).bfloat16()}), Unfit, "no such module"),
        (lambda t: t.update({"x": torch.zeros(1)}), InvalidRequest, "dtypes BF16, F32"),
    ],
)
def test_shards_that_do_not_fit_each_other_are_refused(
    change: Any, error: type[RoostError], reason: str, tmp_path: Path
) -> None:
    folder = shards(tmp_path / "s", per_expert(base("Qwen3-MoE")), (2, 2, 1, 2))
    edit(folder, "adapter-tp1-ep0-pp0.safetensors", change)
    with pytest.raises(error, match=reason):
        merged(folder, "Qwen3-MoE")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "other"}, "format 'other' 1"),
        ({"version": 2}, "2"),
        ({"tensor": 0}, "can't be"),
        ({"pipeline": 10**9}, "can't be"),
        ({"expert_tensor": 3}, "expert_tensor must be"),
        ({"column_parallel": ["o_proj"]}, "column_parallel holds 'o_proj'"),
        ({"data": 1}, "malformed"),
    ],
)
def test_groups_that_can_not_be_are_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = shards(tmp_path / "s", per_expert(base("Qwen3-MoE")), (1, 1, 1, 1))
    groups = json.loads((folder / "megatron.json").read_text())
    (folder / "megatron.json").write_text(json.dumps({**groups, **change}))
    with pytest.raises(InvalidRequest, match=reason):
        merged(folder, "Qwen3-MoE")
