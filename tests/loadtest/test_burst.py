"""The burst's arithmetic, without an engine; and the whole of it with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest import burst
from loadtest.base_model import PUBLISHED, BaseSize, write_base
from ops.config import check
from packer.shape import BaseShape


def _found(**changes: Any) -> dict[str, Any]:
    def times(seconds: float) -> list[dict[str, list[float]]]:
        return [{"first_token_s": [seconds] * 20, "total_s": [2 * seconds] * 20}] * 3

    found: dict[str, Any] = {
        "cold": times(1.2), "warm": times(1.0), "stock_cold": times(8.0), "stock_warm": times(1.0),
        "quiet_gap_s": [0.1, 0.1, 0.2], "loading_gap_s": [0.15, 0.2, 0.3],
        "asking_gap_s": [0.2, 0.2, 0.4], "warm_gap_s": [0.3, 0.3, 0.6],
        "single_flight_fetches": 1, "single_flight_installs": 1, "promises": [(2.0, 3.0), (4.0, 2.0)],
    }  # fmt: skip
    return {**found, **changes}


def test_ratios_are_of_one_round_each() -> None:
    summary = burst._summary(_found())
    assert (summary["ttft_cold_over_warm_p95"], summary["total_cold_over_warm_p95"]) == (1.2, 1.2)
    assert summary["stock_ttft_cold_over_warm_p95"] == 8.0
    assert summary["base_gap_over_quiet"] == 1.5
    assert summary["base_gap_beside_first_requests_over_quiet"] == 2.0
    assert summary["retry_after_ratio_p95"] == 2.0


def test_what_was_not_measured_is_absent() -> None:
    assert "retry_after_ratio_p95" not in burst._summary(_found(promises=[]))


def test_the_mesh_can_be_told_its_node_table() -> None:
    node = check({"node": burst.node_table()}).node
    assert (node.loads_queued, node.loads_queued_s) == (64, 0.0), "the bound that is asked past"


def test_the_published_case_has_as_many_tensors() -> None:
    shape = BaseShape.from_config(msgspec.json.encode(_config(PUBLISHED)))
    tensors = sum(
        2 * (module.experts or 1)
        for place, module in shape.places()
        if place.module not in ("router", "experts.gate_up")
    )
    assert tensors == 37_248


def _config(size: BaseSize) -> dict[str, Any]:
    from loadtest.base_model import _config

    return _config(size)


def test_a_base_is_whole(tmp_path: Path) -> None:
    """transformers loads it without a weight missing or left over."""
    transformers = pytest.importorskip("transformers")
    for size in (BaseSize(2), BaseSize(2, experts=4)):
        folder = write_base(tmp_path / str(size.experts), size, 1)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert model.config.num_hidden_layers == 2
        assert transformers.AutoTokenizer.from_pretrained(folder).decode([40, 41])


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_burst_on_a_real_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burst, "SMALL", burst.Plan(BaseSize(2), policies=8, stock=4, rounds=1, crowd=40))
    monkeypatch.setattr(burst, "_QUEUED", 16)
    summary = burst.run(tmp_path / "burst.json", small=True, seed=1, plot=tmp_path / "burst.html")
    report = msgspec.json.decode((tmp_path / "burst.json").read_bytes())
    assert report["summary"] == summary
    assert (summary["single_flight_fetches"], summary["single_flight_installs"]) == (1, 1)
    assert report["samples"]["crowd_answered"] == 40
    assert report["samples"]["bound_answered"] == 16 + burst._OVER_THE_BOUND
    assert report["environment"]["stand_in"] is None
    assert summary.keys() >= {"ttft_cold_over_warm_p95", "stock_ttft_cold_over_warm_p95", "base_gap_over_quiet"}
    assert "<svg" in (tmp_path / "burst.html").read_text()
