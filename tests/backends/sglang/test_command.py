from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from backends.interface import EngineSettings
from backends.sglang import command
from backends.sglang.command import command_for, interpreter
from tests.backends.support import tiny_settings
from wire.outcomes import InvalidRequest

CONFIG = """{"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64, "num_key_value_heads": 1,
    "head_dim": 32, "dtype": "bfloat16"}"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(command.PYTHON_VARIABLE, sys.executable)
    (tmp_path / "config.json").write_text(CONFIG)
    return tmp_path


def settings(base: Path, **changes: Any) -> EngineSettings:
    return tiny_settings(base, backend="sglang", **changes)


def line_of(base: Path, **changes: Any) -> str:
    return " ".join(command_for(settings(base, **changes)).argv)


def test_the_command_says_what_the_settings_say(base: Path) -> None:
    made = command_for(settings(base, max_num_seqs=7, extra_args=("--random-seed", "3"), env={"OMP_NUM_THREADS": "5"}))
    line = " ".join(made.argv)
    for part in (
        f"--model-path {base} --served-model-name tiny-base", "--dtype float32", "--max-loras-per-batch 3",
        "--max-lora-rank 8", "--context-length 256", "--max-running-requests 7", "--device cpu",
        # 64 MiB of 2 layers x 1 head x 32 x 4 bytes, keys and values
        "--max-total-tokens 131072", "--random-seed 3",
    ):  # fmt: skip
        assert part in line
    assert made.argv[0] == sys.executable
    assert made.env["OMP_NUM_THREADS"] == "5"
    assert made.env["ROOST_ENGINE"] == "1"
    assert {made.env[f"SGLANG_{dump}_BEFORE_CRASH"] for dump in ("PYSPY_DUMP", "CUDA_COREDUMP")} == {"0"}
    assert made.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert made.token_in == "ROOST_ENGINE_TOKEN"


def test_a_token_takes_what_the_bases_own_dtype_does(base: Path) -> None:
    assert "--max-total-tokens 262144" in line_of(base, dtype="auto")


def test_a_base_in_float32_is_computed_in_what_vllm_takes_for_it(base: Path) -> None:
    assert "--dtype bfloat16" in line_of(base, dtype="auto")
    for stored in ('"dtype": "float32"', '"torch_dtype": "float32"', '"x": 1'):
        (base / "config.json").write_text(CONFIG.replace('"dtype": "bfloat16"', stored))
        line = line_of(base, dtype="auto")
        assert "--dtype bfloat16" in line
        assert "--max-total-tokens 262144" in line
    assert "--dtype float32" in line_of(base)


def test_a_token_in_float_takes_what_one_in_float32_does(base: Path) -> None:
    assert "--max-total-tokens 131072" in line_of(base, dtype="float")


def test_a_base_of_no_known_dtype_is_refused_by_the_field_that_says_it(base: Path) -> None:
    (base / "config.json").write_text(CONFIG.replace("bfloat16", "int3"))
    with pytest.raises(InvalidRequest, match=r"dtype 'auto' of engine .*: config\.json: dtype is 'int3'") as caught:
        command_for(settings(base, dtype="auto"))
    assert caught.value.field == "dtype"


def test_cuda_is_not_told_what_only_the_cpu_needs(base: Path) -> None:
    made = command_for(settings(base, device="cuda", kv_cache_bytes=0, max_model_len=0))
    line = " ".join(made.argv)
    for part in ("torch_native", "--max-total-tokens", "--context-length", "--max-running-requests", "--device"):
        assert part not in line
    assert made.env["SGLANG_USE_CPU_ENGINE"] is None


def test_a_cache_whose_tokens_can_not_be_counted_is_no_guess(base: Path) -> None:
    (base / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="does not say what a token takes") as caught:
        command_for(settings(base))
    assert caught.value.field == "kv_cache_bytes"


@pytest.mark.parametrize(
    ("changes", "message", "field"),
    [
        ({"model_path": "/nowhere"}, "is not a folder", "model_path"),
        ({"slots": 0}, "must be at least 1", "slots"),
        ({"max_rank": 0}, "must be at least 1", "max_rank"),
        ({"device": "tpu"}, "is not auto, cpu or cuda", "device"),
        ({"extra_args": ("--dp-size=2",)}, "make it several engines", "extra_args"),
        ({"extra_args": ("--api-key", "x")}, "a token of its own", "extra_args"),
        ({"env": {"ROOST_ENGINE_TOKEN": "x"}}, "a token of its own", "env"),
    ],
)
def test_settings_that_it_can_not_honour_are_refused(
    base: Path, changes: dict[str, Any], message: str, field: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        command_for(settings(base, **changes))
    assert caught.value.field == field


def test_without_an_environment_it_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(command.PYTHON_VARIABLE, str(tmp_path / "python"))
    with pytest.raises(InvalidRequest, match=r"no SGLang environment at .*make sglang"):
        interpreter()
