"""What a base is computed in where nobody says: the same for SGLang, for the trainer and for vLLM by itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from backends.dtypes import computed_in
from backends.megatron_train.hf_config import KEPT_IN, dtype_of
from backends.sglang import command
from backends.trainer import TrainerSettings
from packer.safetensors_header import MAX_HEADER_BYTES
from tests.backends.support import tiny_settings
from wire.outcomes import InvalidRequest, Unfit

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16,
}  # fmt: skip
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FLAT: list[tuple[dict[str, Any], tuple[torch.dtype, ...], str]] = [
    # what the config says counts, whatever the weights are stored in
    ({"dtype": "bfloat16"}, (F16,), "bfloat16"),
    ({"dtype": "float16"}, (BF16,), "float16"),
    ({"torch_dtype": "half"}, (), "float16"),
    ({"dtype": "float16", "torch_dtype": "bfloat16"}, (), "float16"),
    ({"dtype": None, "torch_dtype": "float16"}, (), "float16"),
    ({"dtype": "float32"}, (F16,), "bfloat16"),
    ({"dtype": "float64"}, (), "bfloat16"),
    ({"dtype": "float8_e4m3fn"}, (), "bfloat16"),
    # else the weights do, all of them
    ({}, (F16,), "float16"),
    ({}, (BF16,), "bfloat16"),
    ({}, (F32,), "bfloat16"),
    ({}, (F16, F32), "bfloat16"),
    ({}, (F16, F64), "bfloat16"),
    ({}, (F16, torch.int8, torch.bool), "float16"),
    ({}, (F16, torch.float8_e4m3fn, torch.float8_e5m2), "float16"),
    ({}, (torch.int32,), "bfloat16"),
    ({"dtype": None}, (), "bfloat16"),
]
NESTED: list[tuple[dict[str, Any], tuple[torch.dtype, ...], str]] = [
    ({"text_config": {"dtype": "float16"}}, (BF16,), "float16"),
    ({"text_config": {"torch_dtype": "float16"}, "vision_config": {"dtype": "bfloat16"}}, (), "float16"),
    ({"dtype": "bfloat16", "text_config": {"dtype": "float16"}}, (), "bfloat16"),
    ({"text_config": {"dtype": "float32"}}, (F16,), "bfloat16"),
    ({"text_config": {}, "vision_config": {"dtype": "float16"}}, (BF16,), "float16"),
    ({"text_config": {}, "vision_config": {}}, (F16,), "float16"),
]


def base_of(folder: Path, config: dict[str, Any], stored: tuple[torch.dtype, ...]) -> Path:
    """A base whose files hold a tensor of each dtype: the first file one, the second the others."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | config))
    for number, dtypes in enumerate((stored[:1], stored[1:])):
        if dtypes:
            tensors = {str(dtype): torch.zeros(2, 2).to(dtype) for dtype in dtypes}
            save_file(tensors, folder / f"model-{number}.safetensors")
    return folder


@pytest.mark.parametrize(("config", "stored", "expected"), FLAT + NESTED)
def test_sglang_is_told_what_the_base_says_and_the_trainer_keeps_it_so(
    config: dict[str, Any], stored: tuple[torch.dtype, ...], expected: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(command.PYTHON_VARIABLE, sys.executable)
    base = base_of(tmp_path, config, stored)
    assert computed_in("auto", base) == expected
    argv = command.command_for(tiny_settings(base, backend="sglang", dtype="auto")).argv
    assert argv[argv.index("--dtype") + 1] == expected
    trainer = TrainerSettings(name="t", model_path=str(base))
    if expected in KEPT_IN:
        assert dtype_of(trainer) == expected
        return
    with pytest.raises(Unfit, match="set the trainer's dtype") as refused:
        dtype_of(trainer)
    assert refused.value.field == "dtype"


@pytest.mark.parametrize(("config", "stored", "expected"), FLAT)
def test_vllm_takes_it_for_the_same(
    config: dict[str, Any], stored: tuple[torch.dtype, ...], expected: str, tmp_path: Path
) -> None:
    vllm_says(base_of(tmp_path, config, stored), expected)


@pytest.mark.parametrize(("config", "stored", "expected"), NESTED)
def test_vllm_takes_a_base_of_parts_for_the_same(
    config: dict[str, Any], stored: tuple[torch.dtype, ...], expected: str, tmp_path: Path
) -> None:
    kinds = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    text = SHAPE | config["text_config"]
    vision = {"model_type": "clip_vision_model"} | config.get("vision_config", {})
    vllm_says(base_of(tmp_path, kinds | config | {"text_config": text, "vision_config": vision}, stored), expected)


def vllm_says(base: Path, expected: str) -> None:
    pytest.importorskip("vllm")
    from vllm.config.model import _get_and_verify_dtype
    from vllm.transformers_utils.config import get_config

    config = get_config(str(base), trust_remote_code=False)
    dtype = _get_and_verify_dtype(str(base), config, "auto", is_pooling_model=False)
    assert dtype == getattr(torch, expected) == getattr(torch, computed_in("auto", base))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("half", "float16"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("float", "float32")],
)
def test_a_dtype_that_is_asked_for_is_what_it_is(asked: str, expected: str, tmp_path: Path) -> None:
    assert computed_in(asked, tmp_path) == expected


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ('{"dtype": "int3"}', "dtype"),
        ('{"torch_dtype": 16}', "torch_dtype"),
        ('{"dtype": {"": "float16"}}', "dtype"),
        ('{"text_config": {"torch_dtype": ""}}', "text_config.torch_dtype"),
        ('{"dtype": "bfloat16"', "config.json"),
        ("[]", "config.json"),
        (None, "config.json"),
    ],
)
def test_a_config_that_says_no_dtype_is_refused_by_its_field(config: str | None, field: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(InvalidRequest, match=field.replace(".", r"\.")) as refused:
        computed_in("auto", tmp_path)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1",
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"{,,}",
        (9).to_bytes(8, "little") + b'{"a": []}',
    ],
)
def test_a_file_that_has_no_header_is_named(file: bytes, tmp_path: Path) -> None:
    base = base_of(tmp_path, {}, (F16,))
    (base / "model-9.safetensors").write_bytes(file)
    with pytest.raises(InvalidRequest, match=r"model-9\.safetensors") as refused:
        computed_in("auto", base)
    assert refused.value.field == "model-9.safetensors"
    # nobody looks at the weights of a base that says what it is
    assert computed_in("auto", base_of(tmp_path, {"dtype": "float16"}, ())) == "float16"


def test_all_headers_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of(tmp_path, {}, (F16, F16))
    size = int(np.fromfile(base / "model-0.safetensors", "<u8", 1)[0])
    monkeypatch.setattr("backends.dtypes.MAX_HEADER_BYTES", size + 8)
    with pytest.raises(InvalidRequest, match="larger than"):
        computed_in("auto", base)
