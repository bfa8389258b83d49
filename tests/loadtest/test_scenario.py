"""Every kind of traffic on a small simulated fleet, and one on a real mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest import scenario
from loadtest.deployment import StubbedMesh, wait_until_answering
from loadtest.simulate.clock import simulate
from loadtest.simulate.world import Shape
from tests.loadtest.simulate.support import quick
from wire.outcomes import InvalidRequest

FLEET = Shape(nodes=3, slots=8, gateways=2, arena=24)


@pytest.mark.parametrize("name", scenario.NAMES)
def test_everything_is_answered_by_what_was_asked_for(name: str) -> None:
    results, _, leaks, loads = simulate(lambda: scenario.on_fleet(quick(), FLEET, name, 1, 10.0, 12.0))
    assert len(results) > 50
    assert {one.status for one in results} == {200}
    assert not any(one.wrong for one in results)
    assert leaks == []
    asked = {one.asked.model for one in results if "/" in one.asked.model}
    assert loads["installs"] >= len(asked)
    if name == "revision-storm":
        assert loads["fetches"] > len(asked)


def test_a_node_that_joins_gets_work_and_one_that_leaves_gets_no_more() -> None:
    results, *_ = simulate(lambda: scenario.on_fleet(quick(), FLEET, "scale-out-and-in", 1, 20.0, 30.0))
    last = [one for one in results if one.node == "n02"]
    assert last
    # from a third of the time to two thirds, and what was under way then
    assert all(9.9 < one.intended < 20.1 for one in last)


def test_a_report_tells_what_clients_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"constants": msgspec.to_builtins(quick())}
    monkeypatch.setattr(scenario, "read_constants", lambda: (quick(), told))
    file = tmp_path / "report.json"
    summary = scenario.run(file, name="base-beside-bursts", seed=1, rate=5.0, seconds=10.0, plot=tmp_path / "page.html")
    assert msgspec.json.decode(file.read_bytes())["summary"] == summary
    assert summary.keys() >= {"first_token_p95_s", "total_p95_s", "base_total_p95_s", "fetches", "installs"}
    assert "<svg" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "no-such-thing"}, "there is no scenario no-such-thing"),
        ({"name": "revision-storm", "url": "http://127.0.0.1:1"}, "only a simulated one"),
    ],
)
def test_what_can_not_be_run_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        scenario.run(tmp_path / "report.json", **{"seed": 1, "rate": 1.0, "seconds": 1.0, **changes})


def test_a_real_mesh_is_asked_for_its_own_policies(tmp_path: Path) -> None:
    with StubbedMesh(tmp_path / "mesh") as mesh:
        for number in range(2):
            mesh.publish(f"acme/p{number}", number)
        wait_until_answering(mesh.port)
        summary = scenario.run(
            tmp_path / "report.json", name="weak-locality", seed=1, rate=20.0, seconds=2.0,
            url=f"http://127.0.0.1:{mesh.port}",
        )  # fmt: skip
        node = mesh.node()
    assert summary["requests"] > 20
    assert summary["answered"] == summary["requests"]
    assert node["installs"] == 2
