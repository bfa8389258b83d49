"""Parameters that the real PEFT adapts: what is packed computes what PEFT computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load

from packer.unpack import write_peft
from tests.packer.moe import CONFIGS
from tests.packer.test_architectures import CLASSES
from tests.packer.trained_with_peft import trained_with_peft

ADAPTERS: list[dict[str, Any]] = [
    {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": ["q_proj"]},
    {"target_parameters": ["experts.down_proj"], "target_modules": []},
    {"target_parameters": ["gate_up_proj"], "target_modules": ["o_proj"], "use_rslora": True},
    {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": [],
     "rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"experts.gate_up_proj": 7}},
]  # fmt: skip
NAMES = ("Qwen3-MoE", "Mixtral", "Moonlight", "GLM-5", "gpt-oss")


def model_of(name: str) -> Any:
    settings = {key: value for key, value in CONFIGS[name].items() if key != "architectures"}
    config = getattr(transformers, f"{CLASSES[name]}Config")(**settings)
    config.architectures = CONFIGS[name]["architectures"]
    torch.manual_seed(0)
    return getattr(transformers, f"{CLASSES[name]}ForCausalLM")(config)


def deltas(model: Any) -> dict[str, torch.Tensor]:
    """What each adapted weight gains: a stack as (experts, out, in)."""
    found = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, peft.tuners.lora.LoraLayer):
            continue
        name = name.removeprefix("base_model.model.model.").replace(".base_layer", "")
        delta = layer.get_delta_weight("default").detach()
        if isinstance(layer, peft.tuners.lora.layer.ParamWrapper):
            turned = getattr(layer.get_base_layer(), "is_transposed", False)
            found[f"{name}.{layer.parameter_name}"] = delta.transpose(1, 2) if turned else delta
        else:
            found[name] = delta
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_revision_computes_what_peft_computes(name: str, adapter: dict[str, Any], tmp_path: Path) -> None:
    settings = {"r": 3, "lora_alpha": 5, "lora_dropout": 0.0, **adapter}
    model, shape, file = trained_with_peft(model_of(name), tmp_path, **settings)

    trained = deltas(model)
    tensors = load(bytes(file.buffer))
    computed = {}
    for pair in file.pairs:
        path = shape.modules[pair.place.layer][pair.place.module].path.replace(".{}.w2", ".{}.down_proj")
        path = path.replace("block_sparse_moe", "mlp").replace(".{}", "")
        product = tensors[f"{pair.place}.B"] @ tensors[f"{pair.place}.A"] * file.scale(pair)
        computed[f"layers.{pair.place.layer}.{path}"] = product
    assert computed.keys() == trained.keys()
    assert all(torch.allclose(computed[module], trained[module], rtol=1e-5, atol=1e-5) for module in trained)

    write_peft(bytes(file.buffer), tmp_path / "back")
    again = deltas(peft.PeftModel.from_pretrained(model_of(name), tmp_path / "back"))
    assert again.keys() == trained.keys()
    assert all(torch.equal(again[module], trained[module]) for module in trained)
    assert json.loads((tmp_path / "back" / "adapter_config.json").read_text())["target_parameters"]
