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
from tests.packer.moe import CONFIGS, WITH_EXPERTS, base
from wire.outcomes import InvalidRequest

CLASSES = {
    "Qwen3-MoE": "Qwen3Moe", "Mixtral": "Mixtral", "DeepSeek-V3": "DeepseekV3", "Moonlight": "DeepseekV3",
    "Kimi-K2": "DeepseekV3", "GLM-5": "GlmMoeDsa", "gpt-oss": "GptOss",
}  # fmt: skip
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
# the fields that count, of the published config.json of each
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_hidden_layers": 48, "mlp_only_layers": [], "decoder_sparse_step": 1,
    },
    "Mixtral-8x7B": {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_local_experts": 8, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    },
    "DeepSeek-V3": {
        **LATENT, "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "q_lora_rank": 1536,
        "num_attention_heads": 128, "num_hidden_layers": 61, "first_k_dense_replace": 3, "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
    },
    "Moonlight-16B-A3B": {
        **LATENT, "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 2048, "intermediate_size": 11264,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "q_lora_rank": None,
        "num_attention_heads": 16, "num_hidden_layers": 27, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    },
    "Kimi-K2": {
        **LATENT, "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1, "q_lora_rank": 1536,
        "num_attention_heads": 64, "num_hidden_layers": 61, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    },
    "GLM-5": {
        **LATENT, "architectures": ["GlmMoeDsaForCausalLM"], "hidden_size": 6144, "intermediate_size": 12288,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "q_lora_rank": 2048,
        "qk_nope_head_dim": 192, "v_head_dim": 256, "num_attention_heads": 64, "num_hidden_layers": 78,
        "first_k_dense_replace": 3, "index_n_heads": 32, "index_head_dim": 128, "num_nextn_predict_layers": 1,
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
        "num_local_experts": 128, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 36,
    },
}  # fmt: skip
# weights in all of a model's adaptable modules, in thousand millions: near the size in each one's name
BILLIONS = {
    "Qwen3-30B-A3B": 29.9, "Mixtral-8x7B": 46.4, "DeepSeek-V3": 680.7, "Moonlight-16B-A3B": 15.3, "Kimi-K2": 1024.1,
    "GLM-5": 752.0, "gpt-oss-120b": 115.6,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(name: str) -> None:
    shape = BaseShape.from_config(json.dumps(PUBLISHED[name]).encode())
    weights = sum(
        module.inputs * module.outputs * (module.experts or 1)
        for place, module in shape.places()
        if place.module != "experts.gate_up"
    )
    assert weights / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


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
