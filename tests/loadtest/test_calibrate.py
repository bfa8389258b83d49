"""From measurements to the constants that made them, and what is refused to be taken for constants."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.interface import EngineSettings
from loadtest.calibrate import fit
from loadtest.held_out import model_over_real
from loadtest.simulate.backend import EngineProcess
from loadtest.simulate.clock import simulate
from loadtest.simulate.constants import EngineConstants, read_constants
from tests.loadtest.simulate.support import constants
from wire.outcomes import InvalidRequest


def _tokens(count: int, interval_s: float) -> tuple[int, list[float], list[float]]:
    """What few tokens took and 32 more of them: a slow run of the one says nothing of the other."""
    return count, [0.9, 0.05, 0.4], [0.05 + 32 * interval_s, 2.0, 0.05 + 33 * interval_s]


def samples(**changes: Any) -> dict[str, Any]:
    """Of an engine of 10 ms a step, 1 ms a sequence, 0.1 ms a token, 5 ms a request, of which 2 ms are the server's.
    With adapters, 4 ms and 0.5 ms each, 3 ms each with a prompt, and 0.05 ms a token.
    """
    found: dict[str, Any] = {
        "tokens_s": [_tokens(count, 0.010 + 0.001 * count) for count in (1, 2, 4, 8, 16)],
        "first_token_s": [(length, [0.005 + 0.011 + 0.0001 * length]) for length in (16, 128, 512)],
        "at_once_s": [(count, [0.02 + (0.002 + 0.001 + 16 * 0.0001) * count]) for count in (1, 2, 4, 8, 16)],
        "adapters_tokens_s": [_tokens(count, 0.014 + 0.0015 * count) for count in (1, 2, 4, 8, 16)],
        "adapter_first_token_s": [(length, [0.0235 + 0.00015 * length]) for length in (16, 128, 512)],
        "adapters_at_once_s": [
            (count, [0.03 + (0.002 + 0.0015 + 0.003 + 16 * 0.00015) * count]) for count in (1, 2, 4, 8, 16)
        ],
        "install_stall_s": [0.020],
        "stock_stall_s": [1.1],
        "fetch_s": [(size, [0.001 + size * 1e-9]) for size in (4096, 1 << 20, 1 << 24)],
        "install_call_s": [0.0325, 0.9],
        "remove_call_s": [0.0035, 0.3],
        "stock_call_s": [1.2],
        "start_s": 40.0,
    }
    return {**found, **changes}


def test_the_constants_that_made_the_samples_are_found() -> None:
    found = fit(samples(), 5_000)
    expected = {
        "step_s": 0.010, "sequence_s": 0.001, "prefill_s": 0.0001, "adapters_s": 0.004, "adapter_s": 0.0005,
        "adapter_prompt_s": 0.003, "adapter_prefill_s": 0.00005, "request_s": 0.005, "front_s": 0.002,
        "install_s": 0.020, "prepare_s": 0.012, "remove_s": 0.003, "stock_install_s": 1.1, "fetch_s": 0.001,
        "fetch_byte_s": 1e-9, "start_s": 40.0, "adapter_bytes": 5_000,
    }  # fmt: skip
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-3), name


def test_what_is_lost_in_noise_is_nothing_and_not_less() -> None:
    flat = [_tokens(1, 0.011), _tokens(16, 0.011)]
    noisy = samples(install_stall_s=[-0.002], adapters_tokens_s=flat, first_token_s=[(16, [0.02]), (512, [0.01])])
    found = fit(noisy, 5_000)
    assert (found.install_s, found.adapter_s, found.prefill_s) == (0.0, 0.0, 0.0)


def test_a_call_costs_the_engine_no_more_than_it_took() -> None:
    found = fit(samples(install_stall_s=[0.5], stock_stall_s=[9.0]), 5_000)
    assert (found.install_s, found.prepare_s, found.stock_install_s) == (0.0325, 0.0, 1.2)


def test_the_model_is_compared_with_what_nothing_was_fitted_to() -> None:
    # one request begins alone, and the others have 16 tokens after it; a load of 2 s each step of 1 s
    real = {"check_s": [17.0, 20.0], "loads_check_s": [(96.0, 60.0), (99.0, 70.0)]}
    found = model_over_real(constants(), real)
    assert found == {"model_over_real": 1.0, "loads_model_over_real": pytest.approx(0.5, abs=0.02)}


def test_the_server_takes_what_comes_one_after_another() -> None:
    async def passing() -> list[float]:
        settings = EngineSettings(name="e", base="b", fingerprint="f" * 64)
        engine = EngineProcess(settings, constants(front_s=1.0), stock=False)
        found = [engine.passes_in(3.0) for _ in range(3)]
        await asyncio.sleep(10.0)
        return [*found, engine.passes_in(0.5)]

    assert simulate(passing) == [3.0, 4.0, 5.0, 1.0]


def _written(file: Path, body: object) -> Path:
    file.write_bytes(msgspec.json.encode(body))
    return file


def test_a_simulation_says_whose_constants_it_used(tmp_path: Path) -> None:
    report = {
        "environment": {"engine": "vllm", "processor": "a chip", "cores": 2, "commit": "abc"},
        "samples": {"constants": msgspec.to_builtins(constants())},
    }
    found, told = read_constants(_written(tmp_path / "engine.json", report))
    assert found == constants()
    assert told["constants"]["install_s"] == 2.0
    assert told["fitted_to"]["processor"] == "a chip"


@pytest.mark.parametrize(
    "body",
    [
        {"samples": {}},
        {"samples": {"constants": {"step_s": 1.0}}},
        {"samples": {"constants": {**msgspec.to_builtins(constants()), "step_s": -1.0}}},
        {"samples": {"constants": {**msgspec.to_builtins(constants()), "unheard_of": 1.0}}},
        [1],
    ],
)
def test_constants_that_are_none_are_refused(tmp_path: Path, body: object) -> None:
    with pytest.raises(InvalidRequest, match="holds no engine constants"):
        read_constants(_written(tmp_path / "engine.json", body))


def test_without_a_calibration_nothing_is_simulated(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="roost loadtest calibrate"):
        read_constants(tmp_path / "engine.json")


@pytest.mark.parametrize("changes", [{"step_s": 0.0}, {"max_batch": 0}, {"step_tokens": 0}, {"fetch_s": float("nan")}])
def test_an_engine_that_takes_no_time_is_none(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        EngineConstants(**{**msgspec.to_builtins(constants()), **changes})
