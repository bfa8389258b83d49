"""A base's shape follows from its config.json, and equals what transformers builds."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from packer.modules import Place
from packer.shape import BaseShape
from tests.packer.adapters import CONFIG, shape_of
from wire.outcomes import InvalidRequest, RoostError, Unfit

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"head_dim": 12}),
        ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("Qwen2", {}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {}),
        ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    ],
)
def test_the_shape_is_that_of_the_model(name: str, changes: dict[str, Any], tmp_path: Any) -> None:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(tmp_path)
    shape = BaseShape.from_config((tmp_path / "config.json").read_bytes())
    ours = {
        f"model.layers.{place.layer}.{module.path}": (module.outputs, module.inputs) for place, module in shape.places()
    }
    theirs = {
        path: tuple(module.weight.shape)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and path != "lm_head"
    }
    assert ours == theirs
    assert shape.architecture == f"{name}ForCausalLM"


def test_a_tiny_config_gives_named_modules() -> None:
    shape = shape_of()
    assert shape.layers == 3
    assert (shape.modules[2]["k"].inputs, shape.modules[2]["k"].outputs) == (16, 8)
    assert shape.get(Place(3, "q")) is None
    assert shape.get(Place(0, "experts")) is None


def test_llama_without_kv_heads_has_one_a_query_head() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    assert BaseShape.from_config(json.dumps(config).encode()).modules[0]["v"].outputs == 16


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"architectures": ["MambaForCausalLM"]}, Unfit, "'MambaForCausalLM' is not supported"),
        ({"architectures": []}, InvalidRequest, "exactly one architecture"),
        ({"architectures": "LlamaForCausalLM"}, InvalidRequest, "exactly one architecture"),
        ({"hidden_size": None}, InvalidRequest, "lacks hidden_size"),
        ({"hidden_size": "16"}, InvalidRequest, "hidden_size"),
        ({"hidden_size": True}, InvalidRequest, "hidden_size"),
        ({"num_hidden_layers": 0}, InvalidRequest, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, InvalidRequest, "num_hidden_layers"),
        ({"intermediate_size": 1 << 40}, InvalidRequest, "intermediate_size"),
        ({"num_attention_heads": [4]}, InvalidRequest, "a list of 1"),
        ({"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": None}, InvalidRequest, "num_key_value_heads"),
    ],
)
def test_an_unusable_config_is_refused_by_field(changes: dict[str, Any], error: type[RoostError], reason: str) -> None:
    with pytest.raises(error, match=reason):
        shape_of(**changes)


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff", b"{" * 100_000, b" " * (5 << 20)])
def test_a_config_that_is_none_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        BaseShape.from_config(raw)
