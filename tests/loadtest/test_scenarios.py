"""The simulated scenarios in small: what each must show, and that its books balance."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from catalog.view import CatalogView
from gateway.leases import LeaseDesk
from loadtest import chaos, fairness, two_nodes, wave
from loadtest.catalog.filled import fill
from loadtest.simulate.clock import simulate
from loadtest.simulate.constants import read_constants
from loadtest.simulate.registrar import RegistrarProcess
from loadtest.simulate.world import Shape
from tests.loadtest.simulate.support import forget_releases, quick


def _stress(shape: Shape, *, sticky: bool = False) -> two_nodes.Stressed:
    return simulate(lambda: two_nodes.stress(quick(), shape, 1, sticky=sticky, policies=192, concurrency=90))


def test_two_nodes_serve_everything_sooner_than_a_sticky_hash() -> None:
    ours = _stress(two_nodes.OURS)
    sticky = _stress(two_nodes.STICKY, sticky=True)
    assert (ours.errors, len(ours.results), ours.leaks) == (0, 192, [])
    assert (sticky.errors, sticky.leaks) == (0, [])
    assert ours.p95_s < sticky.p95_s
    assert any(one.refusals for one in sticky.results)


def test_a_sticky_hash_knows_no_second_node() -> None:
    sticky = _stress(two_nodes.STICKY, sticky=True)
    by_policy = {one.asked.model: one.node for one in sticky.results}
    again = _stress(msgspec.structs.replace(two_nodes.STICKY, arena=32), sticky=True)
    assert {one.asked.model: one.node for one in again.results} == by_policy
    assert len(set(by_policy.values())) == 2


def test_a_wave_loads_each_policy_once_and_spreads_them(tmp_path: Path) -> None:
    shape = Shape(nodes=6, slots=16, gateways=2, arena=24)
    with closing(CatalogView.open(fill(tmp_path / "catalog", 3_000, 1))) as view:
        found = simulate(lambda: wave.wave(quick(), shape, view, 1, catalog=3_000, distinct=80, seconds=40.0))
    assert {one.status for one in found.results} == {200}
    assert not any(one.wrong for one in found.results)
    assert found.leaks == []
    assert found.fetched_bytes <= 1.05 * found.distinct_bytes
    assert found.busiest_over_mean() < 1.5


def test_a_flood_slows_the_victim_by_less_than_the_bar() -> None:
    constants, _ = read_constants()
    alone, flooded = (
        simulate(lambda: fairness.beside(kind, constants, fairness.FLEET, 1, 10.0))  # noqa: B023
        for kind in (fairness.Neighbours.NOBODY, fairness.Neighbours.FLOOD)
    )
    assert flooded.p95_s() <= 1.3 * alone.p95_s()
    assert all(one.status == 200 and not one.wrong for one in flooded.victims)


@pytest.mark.parametrize("kind", list(fairness.Neighbours))
def test_the_victims_requests_are_the_same_whoever_asks_beside(kind: fairness.Neighbours) -> None:
    found = simulate(lambda: fairness.beside(kind, quick(), fairness.FLEET, 1, 4.0))
    nobody = simulate(lambda: fairness.beside(fairness.Neighbours.NOBODY, quick(), fairness.FLEET, 1, 4.0))
    assert [one.asked for one in found.victims] == [one.asked for one in nobody.victims]
    assert len(found.victims) > 5
    assert {one.status for one in found.victims} == {200}
    assert not any(one.wrong for one in found.victims)
    assert found.leaks == []


def test_a_fleet_in_which_everything_dies_keeps_exact_books(tmp_path: Path) -> None:
    course = simulate(lambda: chaos.chaos(quick(), chaos.FLEET, tmp_path, 3, seconds=600.0, rate=2.0, every_s=10.0))
    summary = course.summary()
    assert summary["faults"] > 20
    assert len(course.faults) >= 6
    assert (summary["wrong_answers"], summary["lost_acknowledged"]) == (0, 0)
    assert (course.unrecovered, course.leaks) == ([], [])
    assert summary["answered"] > 0.9 * summary["requests"]


def test_lost_releases_show_though_faults_lose_some_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseDesk, "flush", forget_releases)
    course = simulate(lambda: chaos.chaos(quick(), chaos.FLEET, tmp_path, 3, seconds=300.0, rate=2.0, every_s=10.0))
    assert course.faults["cut"] > 0
    assert any("given back unheard" in leak for leak in course.leaks)


async def test_a_registrar_that_dies_loses_only_what_it_did_not_acknowledge(tmp_path: Path) -> None:
    with closing(RegistrarProcess(tmp_path / "catalog", 1000)) as registrar:
        assert registrar.publish("a/one")
        for after in (False, True):
            registrar.die_at_next_commit(after=after)
            assert not registrar.publish("a/one")
            assert not registrar.up
            assert not registrar.publish("a/one")
            registrar.restart()
        assert registrar.publish("a/one")
        assert [one.revision for one in registrar.acknowledged] == [1, 3]
        assert registrar.lost() == []


async def test_a_loss_would_be_told(tmp_path: Path) -> None:
    with closing(RegistrarProcess(tmp_path / "catalog", 1000)) as registrar:
        registrar.publish("a/one")
        registrar.acknowledged.append(msgspec.structs.replace(registrar.acknowledged[0], revision=2))
        assert [one.revision for one in registrar.lost()] == [2]


@pytest.mark.parametrize("scenario", [two_nodes, fairness, chaos])
def test_a_report_names_the_model_and_its_constants(
    scenario: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def constants(file: Path) -> tuple[Any, dict[str, Any]]:
        return quick(), {"engine": "a model", "constants": msgspec.to_builtins(quick())}

    monkeypatch.setattr(scenario, "read_constants", constants)
    _make_small(scenario, monkeypatch)
    summary = scenario.run(tmp_path / "report.json", small=True, seed=1, plot=tmp_path / "page.html")
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes())
    assert report["summary"] == summary
    assert summary.keys() >= _NAMES[scenario.__name__]
    assert report["environment"]["stand_in"]["constants"]["step_s"] == 0.02
    assert "<svg" in (tmp_path / "page.html").read_text()


_NAMES = {
    "loadtest.two_nodes": {"errors", "p95_over_sticky", "completed"},
    "loadtest.fairness": {"victim_p95_over_alone"},
    "loadtest.chaos": {"faults", "wrong_answers", "lost_acknowledged", "unrecovered", "leaks"},
}


def _make_small(scenario: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if scenario is two_nodes:
        whole = two_nodes.stress
        monkeypatch.setattr(
            two_nodes, "stress", lambda *arguments, **named: whole(*arguments, **named, policies=48, concurrency=20)
        )
    elif scenario is fairness:
        beside = fairness.beside
        monkeypatch.setattr(fairness, "beside", lambda *arguments: beside(*arguments[:-1], 2.0))
    else:
        course = chaos.chaos
        monkeypatch.setattr(
            chaos, "chaos", lambda *arguments, **named: course(*arguments, **{**named, "seconds": 60.0})
        )
