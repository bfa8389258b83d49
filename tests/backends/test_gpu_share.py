"""What is refused of a GPU before anything is started on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.gpu_share import check_share
from backends.interface import EngineSettings
from backends.registry import check_settings
from wire.outcomes import InvalidRequest

VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


@pytest.mark.parametrize("environment", [{}, {VARIABLE: ""}, {VARIABLE: "100"}, {VARIABLE: "100.0"}])
def test_a_whole_gpu_is_taken(environment: dict[str, str]) -> None:
    check_share(environment, "trainer t")


@pytest.mark.parametrize("percentage", ["60", "99.5", "0", "most"])
def test_a_part_of_a_gpu_is_refused(percentage: str) -> None:
    with pytest.raises(InvalidRequest, match=f"trainer t would run with {VARIABLE}={percentage}: .* wrong") as refused:
        check_share({VARIABLE: percentage}, "trainer t")
    assert refused.value.field == "env"


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_an_engine_on_a_part_of_a_gpu_is_refused(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    settings = EngineSettings(
        name="one", backend=backend, base="b", fingerprint="", model_path=str(tmp_path), device="cuda"
    )
    check_settings(settings)
    monkeypatch.setenv(VARIABLE, "60")
    with pytest.raises(InvalidRequest, match=f"engine one would run with {VARIABLE}=60"):
        check_settings(settings)
