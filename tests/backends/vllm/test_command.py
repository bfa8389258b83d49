from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.vllm.command import LORA_RANKS, command_for, device_of, rank_limit
from tests.backends.support import tiny_settings
from wire.outcomes import InvalidRequest


@given(st.integers(1, LORA_RANKS[-1]))
def test_the_engines_rank_covers_the_one_asked_for(rank: int) -> None:
    limit = rank_limit(rank)
    assert limit in LORA_RANKS
    assert limit >= rank
    assert all(smaller < rank for smaller in LORA_RANKS if smaller < limit)


@pytest.mark.parametrize("rank", [0, -1, 513])
def test_a_rank_that_vllm_has_not_is_refused(rank: int) -> None:
    with pytest.raises(InvalidRequest, match=f"max_rank {rank} is not within 1 to 512"):
        rank_limit(rank)


def test_the_command_says_what_the_settings_say(tmp_path: Path) -> None:
    command = command_for(
        tiny_settings(tmp_path, max_num_seqs=7, extra_args=("--seed", "3"), env={"OMP_NUM_THREADS": "5"})
    )
    line = " ".join(command.argv)
    for part in (
        f"--model {tmp_path} --served-model-name tiny-base", "--dtype float32", "--max-loras 2 --max-cpu-loras 4",
        "--max-lora-rank 8", "--max-model-len 256", f"--kv-cache-memory-bytes {64 << 20}", "--max-num-seqs 7",
        "--enforce-eager --seed 3",
    ):  # fmt: skip
        assert part in line
    assert command.env["OMP_NUM_THREADS"] == "5"
    assert command.env["ROOST_ENGINE"] == "1"
    assert command.token_in == "VLLM_API_KEY"
    assert command.env["VLLM_CPU_KVCACHE_SPACE"] is None


def test_zero_leaves_the_choice_to_the_engine(tmp_path: Path) -> None:
    line = " ".join(command_for(tiny_settings(tmp_path, device="cuda", max_model_len=0, kv_cache_bytes=0)).argv)
    assert "--max-model-len" not in line
    assert "--kv-cache" not in line
    assert "--max-num-seqs" not in line


def test_on_cpu_the_kv_cache_leaves_memory_to_others(tmp_path: Path) -> None:
    line = " ".join(command_for(tiny_settings(tmp_path, kv_cache_bytes=0)).argv)
    assert f"--kv-cache-memory-bytes {1 << 30}" in line


def test_cuda_is_not_told_what_only_the_cpu_needs(tmp_path: Path) -> None:
    command = command_for(tiny_settings(tmp_path, device="cuda"))
    assert "--enforce-eager" not in command.argv
    assert not any("CPU" in name or "OMP" in name for name in command.env)


def test_the_digest_follows_whatever_changes_the_engine(tmp_path: Path) -> None:
    base = command_for(tiny_settings(tmp_path)).digest()
    assert base == command_for(tiny_settings(tmp_path, port=9, fingerprint="0" * 64, start_timeout_s=1)).digest()
    for change in ({"slots": 3}, {"max_rank": 16}, {"dtype": "bfloat16"}, {"env": {"A": "b"}}, {"base": "other"}):
        assert command_for(tiny_settings(tmp_path, **change)).digest() != base


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "tpu"}, "is not auto, cpu or cuda"),
        ({"extra_args": ("--data-parallel-size=2",)}, "make it several engines"),
        ({"extra_args": ("-dp", "2")}, "can't be given -dp"),
        ({"extra_args": ("--api-key", "x")}, "has a token of its own"),
        ({"extra_args": ("--api-key=x",)}, "has a token of its own"),
        ({"env": {"VLLM_API_KEY": "x"}}, "take VLLM_API_KEY out"),
        ({"slots": 0}, "slots of engine tiny must be at least 1"),
        ({"max_rank": 1000}, "max_rank 1000"),
        ({"model_path": "/nowhere/at/all"}, "is not a folder"),
    ],
)
def test_settings_that_can_not_be_honoured_are_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        command_for(tiny_settings(tmp_path, **change))


def test_auto_is_the_device_that_is_there(tmp_path: Path) -> None:
    assert device_of(tiny_settings(tmp_path, device="auto")) == ("cuda" if torch.cuda.is_available() else "cpu")
