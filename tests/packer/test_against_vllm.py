"""What an engine folder makes of an adapter is, to the last bit, what vLLM makes of the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from packer.modules import DENSE_PATHS
from packer.shape import BaseShape
from packer.unpack import write_engine_peft
from tests.packer.adapters import PREFIX, Tensors, config_for, packed, tensors_for, write_folder
from tests.packer.moe import base, config, folder_of, outer, per_expert, stacked

NAMES = {path.rpartition(".")[2] for path in DENSE_PATHS.values()}
UNIFORM: tuple[dict[str, Any], dict[str, int]] = ({"use_rslora": True, "lora_alpha": 7}, {})
PATTERNS: tuple[dict[str, Any], dict[str, int]] = (
    {
        "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 7},
        "alpha_pattern": {"v_proj": 11, r"layers\.[01]\.mlp\..*": 3},
        "use_rslora": True,
    },
    {"q": 3, "layers.1.down": 7},
)


EXPERT_NAMES = {f"experts.{expert}.{name}" for expert in range(4) for name in ("gate_proj", "up_proj", "down_proj")}
PARAMETERS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def loaded(folder: Path, dtype: torch.dtype, names: set[str] = NAMES) -> dict[str, Any]:
    """The weights as vLLM holds them before it copies them into a slot: scaled, in the engine's dtype."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(folder), None)
    model = LoRAModel.from_local_checkpoint(str(folder), names, helper, lora_model_id=1, device="cpu", dtype=dtype)
    return {name: weights.optimize() for name, weights in model.loras.items()}


@pytest.mark.engine
@pytest.mark.parametrize("adapter", [UNIFORM, PATTERNS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", [torch.float32, torch.bfloat16, torch.float16])
def test_vllm_loads_the_same_bits(
    adapter: tuple[dict[str, Any], dict[str, int]],
    dtype: torch.dtype,
    engine: torch.dtype,
    shape: BaseShape,
    tmp_path: Path,
) -> None:
    config, ranks = adapter
    original = write_folder(tmp_path / "a", tensors_for(shape, ranks=ranks, dtype=dtype), config_for(**config))
    write_engine_peft(packed(original, shape), tmp_path / "engine", dtype=str(engine).removeprefix("torch."))
    theirs, ours = loaded(original, engine), loaded(tmp_path / "engine", engine)
    assert theirs.keys() == ours.keys()
    for name, weights in theirs.items():
        rank = weights.lora_a.shape[0]
        assert torch.equal(weights.lora_a, ours[name].lora_a[:rank])
        assert torch.equal(weights.lora_b, ours[name].lora_b[:, :rank])
        assert not ours[name].lora_a[rank:].any()
        assert not ours[name].lora_b[:, rank:].any()


def deltas(folder: Path, layer: int) -> dict[str, torch.Tensor]:
    """What vLLM's own packing makes of a layer's experts: each of w1, w2, w3 as (experts, out, in)."""
    from vllm.lora.lora_weights import PackedLoRALayerWeights

    weights = loaded(folder, torch.float32, NAMES | EXPERT_NAMES)
    path = f"model.layers.{layer}.mlp.experts"
    order = [weights.get(f"{path}.{e}.{name}_proj") for e in range(4) for name in ("gate", "down", "up")]
    packed = PackedLoRALayerWeights.pack_moe(order, path).optimize()
    return {name: packed.lora_b[i] @ packed.lora_a[i] for i, name in enumerate(("w1", "w2", "w3"))}


def left_out(tensors: Tensors, *kept: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if any(part in name for part in kept)}


@pytest.mark.engine
@pytest.mark.parametrize("alpha_pattern", [{}, {"mlp.experts.\\d+.down_proj": 5}])
@pytest.mark.parametrize("kept", [("down_proj",), ("up_proj", "q_proj"), ("gate_proj", "down_proj")])
def test_vllm_takes_experts_that_are_adapted_in_part(
    kept: tuple[str, ...], alpha_pattern: dict[str, int], tmp_path: Path
) -> None:
    shape = base("Qwen3-MoE")
    tensors = left_out(per_expert(shape, dtype=torch.float32), *kept)
    settings = config(target_modules=list(kept), alpha_pattern=alpha_pattern if "down_proj" in kept else {})
    write_engine_peft(packed(folder_of(tmp_path / "a", tensors, settings), shape), tmp_path / "engine", dtype="float32")
    found = deltas(tmp_path / "engine", 2)
    for name, half in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        if name not in kept:
            assert not found[half].any()
            continue
        scale = (5 if alpha_pattern and name == "down_proj" else 8) / 3
        for expert in range(4):
            stem = f"{PREFIX}layers.2.mlp.experts.{expert}.{name}"
            expected = (tensors[f"{stem}.lora_B.weight"] * scale) @ tensors[f"{stem}.lora_A.weight"]
            torch.testing.assert_close(found[half][expert], expected)


@pytest.mark.engine
@pytest.mark.parametrize("only", ["", "experts.down", "experts.gate_up"])
def test_vllm_takes_what_peft_stacks(only: str, tmp_path: Path) -> None:
    shape = base("Qwen3-MoE")
    tensors, stacks = stacked(shape, only=only)
    names = [name for name in PARAMETERS["target_parameters"] if not only or only.rpartition(".")[2] in name]
    folder = folder_of(tmp_path / "a", tensors, config(target_parameters=names))
    write_engine_peft(packed(folder, shape), tmp_path / "engine", dtype="float32", base=shape)
    found = deltas(tmp_path / "engine", 2)
    for place, halves in (("experts.gate_up", ("w1", "w3")), ("experts.down", ("w2",))):
        given = stacks.get(f"layers.2.{place}")
        whole = torch.cat([found[half] for half in halves], dim=1)
        if given is None:
            assert not whole.any()
        else:
            torch.testing.assert_close(whole, (given[1] * (8 / 3)) @ given[0])


@pytest.mark.engine
def test_vllm_takes_factors_that_experts_share(tmp_path: Path) -> None:
    shape = base("Qwen3-MoE")
    tensors = outer(shape)
    write_engine_peft(packed(folder_of(tmp_path / "a", tensors, config()), shape), tmp_path / "engine", base=shape)
    found = deltas(tmp_path / "engine", 0)
    for name, delta in found.items():
        stem = f"{PREFIX}layers.0.mlp.experts.{name}"
        a, b = tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"]
        torch.testing.assert_close(delta, (b * (8 / 3)) @ a)
