"""A base of the kind that is trained on a GPU, small enough for a CPU."""

from __future__ import annotations

from pathlib import Path

from loadtest.training.bases import QWEN3_4B, TrainedBase, write_random

CONFIG = QWEN3_4B | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 1000, "max_position_embeddings": 2048,
}  # fmt: skip


def tiny_base(folder: Path) -> TrainedBase:
    write_random(folder, CONFIG, 1)
    return TrainedBase("tiny", "cpu", folder, {"weights": "random"})
