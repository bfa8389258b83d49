"""Shards cut as megatron-core cuts its weights, process by process, give the revision that the whole adapter gives.

What follows restates megatron-core 0.16.1, not our reader: ``RankGenerator`` and the order "tp-cp-ep-dp-pp" of
``parallel_state``, the split of a weight into ``weight_list[rank::world_size]`` of ``tensor_parallel.layers`` (with
stride 2 for a gated ``linear_fc1``), the rows ``q1 q2 k1 v1 | q3 q4 k2 v2`` of ``linear_qkv``, the offset of an expert
rank's ``local_experts``, and the layers of a stage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from tests.packer.adapters import PREFIX, Tensors, packed
from tests.packer.moe import CONFIGS, base, config, folder_of, per_expert
from tests.packer.test_megatron import merged
from wire.outcomes import InvalidRequest

Factors = tuple[torch.Tensor, torch.Tensor]
"""A (rank, in) and B (out, rank)."""
INDEXER = ("wq_b", "wk", "weights_proj")


class Groups(NamedTuple):
    """The sizes of a job; with Transformer Engine (``engine``), MLA's down projections are duplicated, else split."""

    world: int
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    pipeline: int = 1
    engine: bool = True


class Process(NamedTuple):
    """The ranks of one process in the groups that hold different weights."""

    tensor: int
    expert: int
    expert_tensor: int
    stage: int

    @classmethod
    def of(cls, number: int, groups: Groups) -> Process:
        stage_size = groups.world // groups.pipeline
        within = number % stage_size
        return cls(
            tensor=within % groups.tensor,
            expert=within // groups.expert_tensor % groups.expert,
            expert_tensor=within % groups.expert_tensor,
            stage=number // stage_size,
        )


def split(whole: torch.Tensor, dimension: int, rank: int, size: int, stride: int = 1) -> torch.Tensor:
    """The rank's part of a parallel layer's weight."""
    pieces = whole.split(whole.shape[dimension] // size // stride, dimension)
    return torch.cat(pieces[rank::size], dimension)


class Trainer:
    """A process of a job that adapts each projection: it holds what its ranks have of the whole adapter's tensors."""

    def __init__(self, tensors: Tensors, base_config: Mapping[str, Any], groups: Groups, process: Process) -> None:
        self.tensors, self.groups, self.process = tensors, groups, process
        self.config = base_config
        self.own: Tensors = {}

    def factors(self, stem: str) -> Factors:
        return self.tensors[f"{stem}.lora_A.weight"], self.tensors[f"{stem}.lora_B.weight"]

    def has(self, stem: str) -> bool:
        return f"{stem}.lora_A.weight" in self.tensors

    def keep(self, stem: str, a: torch.Tensor, b: torch.Tensor) -> None:
        self.own[f"{stem}.lora_A.weight"] = a.clone().contiguous()
        self.own[f"{stem}.lora_B.weight"] = b.clone().contiguous()

    def column(self, stem: str) -> None:
        a, b = self.factors(stem)
        self.keep(stem, a, split(b, 0, self.process.tensor, self.groups.tensor))

    def row(self, stem: str) -> None:
        a, b = self.factors(stem)
        self.keep(stem, split(a, 1, self.process.tensor, self.groups.tensor), b)

    def duplicated(self, stem: str) -> None:
        self.keep(stem, *self.factors(stem))

    def linear_qkv(self, attention: str) -> None:
        """One weight of which each group of queries has its heads' rows, then a key's and a value's."""
        kv_groups = self.config["num_key_value_heads"]
        per_group = self.config["num_attention_heads"] // kv_groups
        width = self.config.get("head_dim", self.config["hidden_size"] // self.config["num_attention_heads"])
        q, k, v = (self.factors(f"{attention}.{name}_proj") for name in "qkv")
        heads_q, heads_k, heads_v = (b.split(width) for _, b in (q, k, v))
        rows = []
        for group in range(kv_groups):
            rows += [*heads_q[group * per_group : (group + 1) * per_group], heads_k[group], heads_v[group]]
        mixed = split(torch.cat(rows), 0, self.process.tensor, self.groups.tensor)
        mixed = mixed.view(kv_groups // self.groups.tensor, (per_group + 2) * width, -1)
        parts = mixed.split([per_group * width, width, width], 1)
        for name, (a, _), part in zip("qkv", (q, k, v), parts, strict=True):
            self.keep(f"{attention}.{name}_proj", a, part.reshape(-1, part.shape[-1]))

    def gated(self, gate: str, up: str, down: str, *, rank: int, size: int) -> None:
        """``linear_fc1``, of which each rank has its rows of gate, then its rows of up; and ``linear_fc2``."""
        (gate_a, gate_b), (up_a, up_b), (down_a, down_b) = (self.factors(stem) for stem in (gate, up, down))
        fc1 = split(torch.cat([gate_b, up_b]), 0, rank, size, stride=2)
        own_gate, own_up = fc1.chunk(2, 0)
        self.keep(gate, gate_a, own_gate)
        self.keep(up, up_a, own_up)
        self.keep(down, split(down_a, 1, rank, size), down_b)

    def attention(self, attention: str) -> None:
        self.row(f"{attention}.o_proj")
        if self.has(f"{attention}.k_proj"):
            self.linear_qkv(attention)
            return
        down = self.duplicated if self.groups.engine else self.column
        down(f"{attention}.kv_a_proj_with_mqa")
        self.column(f"{attention}.kv_b_proj")
        if self.has(f"{attention}.q_a_proj"):
            down(f"{attention}.q_a_proj")
            self.column(f"{attention}.q_b_proj")
        else:
            self.column(f"{attention}.q_proj")
        for name in INDEXER:
            if self.has(f"{attention}.indexer.{name}"):
                self.duplicated(f"{attention}.indexer.{name}")

    def experts(self, container: str) -> None:
        counts = ("num_experts", "num_local_experts", "n_routed_experts")
        local_experts = next(self.config[name] for name in counts if name in self.config) // self.groups.expert
        offset = self.process.expert * local_experts
        names = ("w1", "w3", "w2") if "block_sparse_moe" in container else ("gate_proj", "up_proj", "down_proj")
        for local in range(local_experts):
            stems = [f"{container}.experts.{offset + local}.{name}" for name in names]
            self.gated(*stems, rank=self.process.expert_tensor, size=self.groups.expert_tensor)

    def mlp(self, layer: str) -> None:
        for container in (f"{layer}.mlp", f"{layer}.block_sparse_moe"):
            if self.has(f"{container}.gate"):
                self.duplicated(f"{container}.gate")
                self.experts(container)
        for container in (f"{layer}.mlp", f"{layer}.mlp.shared_experts"):
            if self.has(f"{container}.gate_proj"):
                stems = [f"{container}.{name}_proj" for name in ("gate", "up", "down")]
                self.gated(*stems, rank=self.process.tensor, size=self.groups.tensor)

    def run(self) -> Tensors:
        """All that the process saves: the layers of its stage, and on the last one those that predict further."""
        layers = self.config["num_hidden_layers"]
        stage_layers = layers // self.groups.pipeline
        offset = self.process.stage * stage_layers
        numbers = list(range(offset, offset + stage_layers))
        if self.process.stage == self.groups.pipeline - 1:
            numbers += range(layers, layers + self.config.get("num_nextn_predict_layers", 0))
        for number in numbers:
            layer = f"{PREFIX}layers.{number}"
            self.attention(f"{layer}.self_attn")
            self.mlp(layer)
            if self.has(f"{layer}.eh_proj"):
                self.column(f"{layer}.eh_proj")
        return self.own


def trained(
    folder: Path, tensors: Tensors, base_config: Mapping[str, Any], groups: Groups, settings: dict[str, Any]
) -> Path:
    """What all processes of the job save; ``settings`` are the adapter's."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    body = {
        "format": "megatron-lora-shards", "version": 1, "tensor": groups.tensor, "expert": groups.expert,
        "pipeline": groups.pipeline, "expert_tensor": groups.expert_tensor,
        "column_parallel": [] if groups.engine else ["q_a_proj", "kv_a_proj_with_mqa"],
    }  # fmt: skip
    (folder / "megatron.json").write_text(json.dumps(body))
    for number in range(groups.world):
        process = Process.of(number, groups)
        file = f"adapter-tp{process.tensor}-ep{process.expert}-pp{process.stage}.safetensors"
        save_file(Trainer(tensors, base_config, groups, process).run(), folder / file)
    return folder


DENSE = [Groups(1), Groups(2, tensor=2), Groups(4, tensor=2), Groups(3, pipeline=3), Groups(6, tensor=2, pipeline=3)]
SPARSE = [
    *(groups._replace(expert_tensor=groups.tensor) for groups in DENSE),
    Groups(2, tensor=2, expert=2),
    Groups(4, tensor=2, expert=4),
    Groups(4, tensor=2, expert=2, expert_tensor=2),
    Groups(4, expert=4),
    Groups(12, tensor=2, expert=2, pipeline=3),
]
JOBS = [
    *[(name, groups) for name in ("Llama", "Qwen2", "Qwen3") for groups in DENSE],
    *[(name, groups) for name in ("Qwen3-MoE", "Mixtral", "Kimi-K2") for groups in SPARSE],
    *[("Moonlight", Groups(4, tensor=4, expert=2, engine=engine)) for engine in (False, True)],
    *[(name, groups) for name in ("DeepSeek-V3", "GLM-5") for groups in SPARSE],
    *[(name, Groups(2, tensor=2, expert=2, engine=False)) for name in ("DeepSeek-V3", "GLM-5")],
]


@pytest.mark.parametrize(("name", "groups"), JOBS)
def test_what_a_job_saves_is_the_whole_adapter(name: str, groups: Groups, tmp_path: Path) -> None:
    tensors = per_expert(base(name))
    whole = packed(folder_of(tmp_path / "whole", tensors, config()), base(name))
    assert merged(trained(tmp_path / "shards", tensors, CONFIGS[name], groups, config()), name) == whole


def test_only_files_of_ranks_that_can_not_be_may_be_absent(tmp_path: Path) -> None:
    tensors = per_expert(base("Kimi-K2"))
    folder = trained(tmp_path / "s", tensors, CONFIGS["Kimi-K2"], Groups(4, tensor=2, expert=4), config())
    assert {path.stem[8:] for path in folder.glob("*.safetensors")} == {
        "tp0-ep0-pp0", "tp1-ep1-pp0", "tp0-ep2-pp0", "tp1-ep3-pp0",
    }  # fmt: skip
    (folder / "adapter-tp0-ep2-pp0.safetensors").unlink()
    with pytest.raises(InvalidRequest, match="no readable adapter-tp0-ep2-pp0"):
        merged(folder, "Kimi-K2")
