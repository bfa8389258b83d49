"""The bases that installs are measured on: 48 layers of 128 experts, at full size on a GPU and narrow on a CPU.

SGLang's are narrow everywhere, as it takes no adapters over weights that it makes up, and of 8 layers on a CPU, where
experts with adapters are stood in for, step by step in torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from loadtest.base_model import BaseSize, write_base, write_tokenizer
from packer.shape import BaseShape

# the smallest that engines take; an adapter of rank 1 in it leaves 7 of 8 rows to be zeroed
_SLOT_RANKS = (8, 16, 32, 64)
SLOTS = 16
CONTEXT = 4096
_SEED = 1

_COMMON = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "max_position_embeddings": 40960,
    "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "router_aux_loss_coef": 0.001,
    "output_router_logits": False, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False,
    "use_cache": True, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B_A3B = _COMMON | {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936,
}  # fmt: skip
# the same 37,248 tensors
NARROW = _COMMON | {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 320,
}  # fmt: skip


class Base(msgspec.Struct, frozen=True):
    """A base on one kind of device (``cpu`` or ``cuda``); its weights are what the engine makes up, unless ``weights``
    are drawn for one that won't.
    """

    name: str
    device: str
    config: Mapping[str, object]
    weights: BaseSize | None = None

    @property
    def shape(self) -> BaseShape:
        return BaseShape.from_config(json.dumps(self.config).encode())

    def write(self, folder: Path) -> Path:
        """The checkpoint's folder: a configuration, a tokenizer of bytes, weights where they are drawn. Raises
        InvalidRequest.
        """
        if not folder.exists() and self.weights is not None:
            write_base(folder, self.weights, _SEED)
        elif not folder.exists():
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(self.config))
            write_tokenizer(folder)
        return folder


def base_for(device: str, engine: str = "vllm") -> Base:
    if engine == "sglang":
        layers = 8 if device == "cpu" else 48
        size = BaseSize(layers, experts=128, hidden=64, intermediate=32, context=CONTEXT)
        return Base(f"qwen3-moe-narrow-{layers}-layers", device, NARROW | {"num_hidden_layers": layers}, size)
    if device == "cuda":
        return Base("qwen3-30b-a3b", device, QWEN3_30B_A3B)
    return Base("qwen3-moe-narrow", device, NARROW)


def slot_rank(rank: int) -> int:
    """The smallest slot that an engine has for adapters of ``rank``."""
    return next(size for size in _SLOT_RANKS if size >= rank)
