"""Shapes from config.json alone: at real size for the models people train, and equal to what transformers builds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from packer.modules import Place
from packer.shape import BaseShape
from tests.packer import published
from tests.packer.moe import CONFIGS, WITH_EXPERTS, base
from wire.outcomes import InvalidRequest

CLASSES = {
    "Qwen3-MoE": "Qwen3Moe", "Mixtral": "Mixtral", "DeepSeek-V3": "DeepseekV3", "Moonlight": "DeepseekV3",
    "Kimi-K2": "DeepseekV3", "GLM-5": "GlmMoeDsa", "gpt-oss": "GptOss",
}  # fmt: skip


@pytest.mark.parametrize("name", published.CONFIGS)
def test_published_models_have_their_published_size(name: str) -> None:
    config = published.CONFIGS[name]
    shape = BaseShape.from_config(json.dumps(config).encode())
    weights = sum(
        module.inputs * module.outputs * (module.experts or 1)
        for place, module in shape.places()
        if place.module != "experts.gate_up" and place.layer < shape.layers - shape.mtp
    )
    embeddings = 2 * config["vocab_size"] * config["hidden_size"]
    assert (weights + embeddings) / 1e9 == pytest.approx(published.BILLIONS[name], rel=0.015)


def names_of(place: Place, path: str) -> str:
    return f"model.layers.{place.layer}.{path}"


def weights_of(model: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path, parameter in model.named_parameters():
        if ".layers." in path and parameter.ndim >= 2 and "norm" not in path:
            yield path.removesuffix(".weight"), tuple(parameter.shape)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_the_shape_is_that_of_the_model(name: str, tmp_path: Any) -> None:
    settings = {key: value for key, value in CONFIGS[name].items() if key != "architectures"}
    config = getattr(transformers, f"{CLASSES[name]}Config")(**settings)
    config.architectures = CONFIGS[name]["architectures"]
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, f"{CLASSES[name]}ForCausalLM")(config)
    shape = BaseShape.from_config((tmp_path / "config.json").read_bytes())
    ours = {}
    for place, module in shape.places():
        if place.layer >= shape.layers - shape.mtp or place.module in ("experts.gate", "experts.up"):
            continue
        # this release of transformers has experts fused, and no more of their old names
        path = {"experts.down": "mlp.experts.down_proj", "block_sparse_moe.gate": "mlp.gate"}.get(
            place.module if place.expert else module.path, module.path
        )
        size: tuple[int, ...] = (module.outputs, module.inputs)
        size = size[::-1] if module.transposed else size
        ours[names_of(place, path)] = (module.experts, *size) if module.experts else size
    biases = ("gate_up_proj_bias", "down_proj_bias")
    theirs = {path: size for path, size in weights_of(model) if not path.endswith(biases)}
    assert ours == theirs


def test_first_layers_are_dense_and_the_last_predict_further() -> None:
    shape = base("GLM-5")
    assert (shape.layers, shape.mtp) == (4, 1)
    assert "gate" in shape.modules[0]
    assert "experts.gate" not in shape.modules[0]
    assert {"shared.gate", "router", "experts.down", "indexer.k"} <= shape.modules[1].keys()
    assert (shape.modules[3]["eh"].inputs, shape.modules[3]["eh"].outputs) == (32, 16)
    assert "q" in base("Moonlight").modules[0]
    assert "q_a" not in base("Moonlight").modules[0]
    assert base("gpt-oss").modules[0]["experts.gate_up"].interleaved
    assert not base("Mixtral").modules[0]["experts.gate_up"].interleaved
    reusing = base("GLM-5", indexer_types=["full", "shared", "full"])
    assert ["indexer.k" in layer for layer in reusing.modules] == [True, False, True, True]


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("Qwen3-MoE", {"num_experts": 10**6}, "num_experts"),
        ("Qwen3-MoE", {"mlp_only_layers": "1"}, "mlp_only_layers"),
        ("DeepSeek-V3", {"num_nextn_predict_layers": 1000}, "num_nextn_predict_layers"),
        ("GLM-5", {"indexer_types": ["full"]}, "indexer_types is for 1 layers"),
        ("GLM-5", {"indexer_types": ["none"] * 3}, "not known"),
        ("GLM-5", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is for 1 layers"),
        ("GLM-5", {"num_nextn_predict_layers": None, "num_mtp_layers": -1}, "num_mtp_layers"),
        ("DeepSeek-V3", {"kv_lora_rank": None}, "lacks kv_lora_rank"),
    ],
)
def test_an_unusable_config_is_refused_by_field(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        base(name, **changes)
