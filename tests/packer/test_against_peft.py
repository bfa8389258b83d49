"""What a revision file computes is what PEFT computes, on the models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load

from packer.unpack import write_engine_peft, write_peft
from tests.packer.trained_with_peft import trained_with_peft

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 12, "vocab_size": 64, "tie_word_embeddings": True,
}  # fmt: skip
# patterns that overlap stand in alphabetical order: PEFT saves them so, and the first match counts
ADAPTERS: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 9, "target_modules": "all-linear"},
    {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    {
        "r": 4, "lora_alpha": 9, "target_modules": ["k_proj", "o_proj", "up_proj", "down_proj"],
        "rank_pattern": {r"^model\.layers\.2\..*": 5, "k_proj": 1, r"layers\.1\d?\.mlp\.up_proj": 6},
        "alpha_pattern": {r"layers\.\d\.mlp\.(up|down)_proj": 3, "o_proj": 0.7}, "use_rslora": True,
    },
    {"r": 2, "lora_alpha": 4, "target_modules": r".*layers\.[0-4]\.(self_attn|mlp)\.(q|gate)_proj"},
    {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "gate_proj"], "layers_to_transform": [0, 3, 11]},
    {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "exclude_modules": [r"layers.5.mlp.up_proj", "o_proj"]},
]  # fmt: skip


def model_of(name: str) -> Any:
    extra = {} if name == "Qwen2" else {"head_dim": 8}
    config = getattr(transformers, f"{name}Config")(**SIZES, **extra)
    config.architectures = [f"{name}ForCausalLM"]
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def deltas(model: Any) -> dict[str, torch.Tensor]:
    """What each adapted module adds to its weight."""
    return {
        name.removeprefix("base_model.model.model."): layer.get_delta_weight("default").detach()
        for name, layer in model.named_modules()
        if isinstance(layer, peft.tuners.lora.LoraLayer)
    }


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_revision_computes_what_peft_computes(name: str, adapter: dict[str, Any], tmp_path: Path) -> None:
    model, shape, file = trained_with_peft(model_of(name), tmp_path, **adapter)

    trained = deltas(model)
    tensors = load(bytes(file.buffer))
    computed = {
        f"layers.{pair.place.layer}.{shape.modules[pair.place.layer][pair.place.module].path}": tensors[
            f"{pair.place}.B"
        ]
        @ tensors[f"{pair.place}.A"]
        * file.scale(pair)
        for pair in file.pairs
    }
    assert computed.keys() == trained.keys()
    assert all(torch.equal(computed[module], trained[module]) for module in trained)

    for write in (write_peft, write_engine_peft):
        folder = tmp_path / write.__name__
        write(bytes(file.buffer), folder)
        again = deltas(peft.PeftModel.from_pretrained(model_of(name), folder))
        assert again.keys() == trained.keys()
        assert all(torch.allclose(again[module], trained[module], rtol=1e-5, atol=1e-5) for module in trained)
        if write is write_peft:
            assert all(torch.equal(again[module], trained[module]) for module in trained)
