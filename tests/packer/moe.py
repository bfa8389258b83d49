"""Small bases of every architecture, and adapters of them in every layout, as the tools that write them would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from packer.modules import EXPERT_PATHS, Place
from packer.shape import BaseShape, ModuleShape
from tests.packer.adapters import PREFIX, Tensors

_COMMON: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "vocab_size": 64,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    **_COMMON, "moe_intermediate_size": 12, "n_routed_experts": 4, "n_shared_experts": 2, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10, "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
# by the name that people know the model by; the sizes that matter are all different
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {**_COMMON, "architectures": ["LlamaForCausalLM"]},
    "Qwen2": {**_COMMON, "architectures": ["Qwen2ForCausalLM"]},
    "Qwen3": {**_COMMON, "architectures": ["Qwen3ForCausalLM"], "head_dim": 6},
    "Qwen3-MoE": {
        **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 6, "moe_intermediate_size": 12,
        "num_experts": 4, "mlp_only_layers": [1], "decoder_sparse_step": 1,
    },
    "Mixtral": {**_COMMON, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
    "DeepSeek-V3": {
        **_LATENT, "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 14, "num_nextn_predict_layers": 1,
    },
    "Moonlight": {**_LATENT, "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": None},
    "Kimi-K2": {**_LATENT, "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 14, "n_shared_experts": 1},
    "GLM-5": {
        **_LATENT, "architectures": ["GlmMoeDsaForCausalLM"], "q_lora_rank": 14, "num_nextn_predict_layers": 1,
        "index_n_heads": 3, "index_head_dim": 5,
    },
    "gpt-oss": {**_COMMON, "architectures": ["GptOssForCausalLM"], "head_dim": 6, "num_local_experts": 4},
}  # fmt: skip
WITH_EXPERTS = tuple(name for name in CONFIGS if name not in ("Llama", "Qwen2", "Qwen3"))


def base(name: str, **changes: Any) -> BaseShape:
    return BaseShape.from_config(json.dumps({**CONFIGS[name], **changes}).encode())


def _modules(shape: BaseShape, left_out: set[str]) -> Iterator[tuple[Place, ModuleShape, str]]:
    for place, module in shape.places():
        if place.module not in left_out:
            yield place, module, f"{PREFIX}layers.{place.layer}."


def per_expert(shape: BaseShape, rank: int = 3, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensors:
    """Every module adapted, each expert with tensors of its own."""
    random = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for _, module, start in _modules(shape, {"experts.gate_up"}):
        for expert in range(module.experts or 1):
            stem = start + module.path.replace("{}", str(expert))
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, module.inputs, generator=random).to(dtype)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(module.outputs, rank, generator=random).to(dtype)
    return tensors


def stacked(
    shape: BaseShape, rank: int = 3, *, only: str = "", block: bool = False, seed: int = 0
) -> tuple[Tensors, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Attention and fused experts, as PEFT saves ``target_parameters``; and each stack as (A, B) with experts first.

    ``only`` adapts one of the two parameters, ``block`` writes B's columns expert by expert.
    """
    random = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    stacks = {}
    for place, module, start in _modules(shape, {"experts.gate", "experts.up", "router"}):
        if place.module not in EXPERT_PATHS:
            tensors[f"{start}{module.path}.lora_A.weight"] = torch.randn(rank, module.inputs, generator=random)
            tensors[f"{start}{module.path}.lora_B.weight"] = torch.randn(module.outputs, rank, generator=random)
            continue
        if only and only != place.module:
            continue
        a = torch.randn(module.experts, rank, module.inputs, generator=random)
        b = torch.randn(module.experts, module.outputs, rank, generator=random)
        inner = place.module == "experts.gate_up" and not only
        stem = f"{start}mlp.experts" + (".base_layer" if inner else "")
        tensors[f"{stem}.lora_A.weight"] = a.reshape(-1, module.inputs).contiguous()
        order = (1, 0, 2) if block else (1, 2, 0)
        tensors[f"{stem}.lora_B.weight"] = b.permute(order).reshape(module.outputs, -1).contiguous()
        stacks[str(place)] = a, b
    return tensors, stacks


def outer(shape: BaseShape, rank: int = 3, *, shared: bool = True, seed: int = 0) -> Tensors:
    """Attention and experts in three dimensions; ``shared``: A of w1 and w3, and B of w2, are one for all."""
    random = torch.Generator().manual_seed(seed)
    names = {"experts.gate": "w1", "experts.up": "w3", "experts.down": "w2"}
    tensors: Tensors = {}
    for place, module, start in _modules(shape, {"experts.gate_up", "router"}):
        a, b = (rank, module.inputs), (module.outputs, rank)
        stem = start + module.path
        if place.module in names:
            down = place.module == "experts.down"
            a = (module.experts if down or not shared else 1, *a)  # type: ignore[assignment]
            b = (1 if down and shared else module.experts, *b)  # type: ignore[assignment]
            stem = f"{start}mlp.experts.{names[place.module]}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(a, generator=random)
        tensors[f"{stem}.lora_B.weight"] = torch.randn(b, generator=random)
    return tensors


def config(rank: int = 3, **changes: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": "all-linear", **changes}


def folder_of(folder: Path, tensors: Tensors, settings: dict[str, Any], **metadata: str) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt", **metadata})
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
