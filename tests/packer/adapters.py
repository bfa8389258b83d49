"""PEFT folders made to measure, written with the stock safetensors library."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from packer.modules import DENSE_PATHS
from packer.peft import pack_peft
from packer.shape import BaseShape

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}
PREFIX = "base_model.model.model."
Tensors = dict[str, torch.Tensor]


def shape_of(**changes: Any) -> BaseShape:
    return BaseShape.from_config(json.dumps({**CONFIG, **changes}).encode())


def tensors_for(
    shape: BaseShape,
    rank: int = 4,
    *,
    modules: tuple[str, ...] = tuple(DENSE_PATHS),
    ranks: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    prefix: str = PREFIX,
    seed: int = 0,
) -> Tensors:
    """Random factors of ``modules`` in every layer; ``ranks`` overrides by module or by place."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for place, module in shape.places():
        if place.module not in modules:
            continue
        r = (ranks or {}).get(str(place), (ranks or {}).get(place.module, rank))
        name = f"{prefix}layers.{place.layer}.{module.path}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(r, module.inputs, generator=random).to(dtype)
        tensors[f"{name}.lora_B.weight"] = torch.randn(module.outputs, r, generator=random).to(dtype)
    return tensors


def config_for(rank: int = 4, modules: tuple[str, ...] = tuple(DENSE_PATHS), **changes: Any) -> dict[str, Any]:
    targets = [DENSE_PATHS[module].rpartition(".")[2] for module in modules]
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "some/base", "r": rank,
        "lora_alpha": 8, "target_modules": targets, "bias": "none", "lora_dropout": 0.1, **changes,
    }  # fmt: skip


def write_folder(folder: Path, tensors: Tensors, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def packed(folder: Path, shape: BaseShape) -> bytes:
    out = io.BytesIO()
    pack_peft(folder, shape, out)
    return out.getvalue()


def rewritten_header(file: bytes, change: Any) -> bytes:
    """``file`` with its header's JSON object passed through ``change``; the data stays."""
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + length])
    raw = json.dumps(change(header) or header, separators=(",", ":")).encode()
    return len(raw).to_bytes(8, "little") + raw + file[8 + length :]
