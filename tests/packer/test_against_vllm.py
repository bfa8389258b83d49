"""What an engine folder makes of an adapter is, to the last bit, what vLLM makes of the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from packer.modules import DENSE_PATHS
from packer.shape import BaseShape
from packer.unpack import write_engine_peft
from tests.packer.adapters import config_for, packed, tensors_for, write_folder

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


def loaded(folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The weights as vLLM holds them before it copies them into a slot: scaled, in the engine's dtype."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(folder), None)
    model = LoRAModel.from_local_checkpoint(str(folder), NAMES, helper, lora_model_id=1, device="cpu", dtype=dtype)
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
