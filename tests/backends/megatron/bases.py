"""Tiny random bases of the trainable kinds, batches for them, and a trainer's rank in this very process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.process import free_port
from backends.trainer import TrainerSettings
from wire.trainer import Batch, Datum, Loss

VOCABULARY = 128
# the same tests hold on a GPU: ROOST_TRAINER_DEVICE=cuda
DEVICE = os.environ.get("ROOST_TRAINER_DEVICE", "cpu")
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.08,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "dtype": "float32",
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    "llama": ("Llama", {"tie_word_embeddings": True, "rope_theta": 100_000.0}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 32, "tie_word_embeddings": False, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48, "norm_topk_prob": True, "mlp_only_layers": [1], "decoder_sparse_step": 1,
        },
    ),
}  # fmt: skip


def make_base(folder: Path, kind: str, seed: int = 0) -> Path:
    """A random fp32 checkpoint as transformers saves it."""
    import torch
    import transformers

    name, extra = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**_COMMON, **extra)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.save_pretrained(folder)
    return folder


def settings_for(base: Path, **changes: Any) -> TrainerSettings:
    options: dict[str, Any] = {
        "name": "tiny", "model_path": str(base), "device": DEVICE, "micro_batch_tokens": 96, "threads": 1,
        "max_rank": 16, "dtype": "float32",
    }  # fmt: skip
    return TrainerSettings(**(options | changes))


@contextlib.contextmanager
def resident(base: Path, scratch: Path, **changes: Any) -> Iterator[Any]:
    """The one rank of a trainer, in this process. Megatron's groups are the process's: one at a time."""
    pytest.importorskip("megatron.core")
    from backends.megatron_train.parallel import stop_parallel
    from backends.megatron_train.resident import Resident

    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(place, MASTER_PORT=str(free_port("127.0.0.1")))
    try:
        yield Resident(settings_for(base, **changes), scratch)
    finally:
        stop_parallel()


def datum(count: int, seed: int, **more: Any) -> Datum:
    """A sequence of ``count`` random tokens, each the target of the one before."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, VOCABULARY, count + 1)
    return Datum(tokens=ids[:-1].astype("<i8").tobytes(), targets=ids[1:].astype("<i8").tobytes(), **more)


def floats(values: Any) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def sft_batch(seed: int = 0, count: int = 5) -> Batch:
    """Sequences of different length under cross entropy, prompts masked out."""
    data = []
    for place in range(count):
        length = 9 + 7 * place
        weights = [0.0] * 4 + [1.0] * (length - 4)
        data.append(datum(length, seed * 100 + place, weights=floats(weights)))
    return Batch(tuple(data), (Loss("cross_entropy"),))


def mixed_batch(seed: int = 0) -> Batch:
    """Every loss, in one batch."""
    random = np.random.default_rng(seed)
    losses = (
        Loss("cross_entropy"), Loss("importance_sampling"), Loss("ppo", {"clip_high_threshold": 1.1}), Loss("cispo"),
        Loss("dro", {"beta": 0.3}), Loss("ppo"),
    )  # fmt: skip
    data = []
    for place in range(9):
        length = 6 + 5 * place
        more = {
            "logprobs": floats(random.normal(-4.8, 0.4, length)), "advantages": floats(random.normal(0, 1, length)),
            "weights": floats(random.normal(0.5, 1, length)) if place % 2 else b"",
        }  # fmt: skip
        data.append(datum(length, 1000 * seed + place, loss=place % len(losses), **more))
    return Batch(tuple(data), losses)
