"""Accounting at run time: the auditor finds what is wrong, once, and reports say so and what placement needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sidecar.events import GatewayHeard, Tick
from sidecar.report import MOST_TENANTS, delta_report, full_report
from sidecar.slots import SlotState
from sidecar.state import Changes, NodeState
from wire.node import Residency
from wire.outcomes import Outcome

from .bench import Bench, digest, name


def findings(bench: Bench) -> int:
    return bench.machine.state.counts["audit_findings"]


def quietly(bench: Bench, seconds: float) -> None:
    """Let time pass without the bench's own audit."""
    end = bench.now + seconds
    while bench.now < end:
        bench.now += 0.5
        bench.machine.handle(GatewayHeard(gateway="g1", instance="i1"), bench.now)
        bench.machine.handle(Tick(), bench.now)


def slot_count_off(state: NodeState) -> None:
    state.engines["e1"].slots[name(1)].leases += 1


def engine_count_off(state: NodeState) -> None:
    state.engines["e1"].outstanding -= 1


def lease_forgotten(state: NodeState) -> None:
    state.leases._leases.popitem()


def drained_for_nobody(state: NodeState) -> None:
    state.engines["e1"].slots[name(1)].state = SlotState.DRAINING


def claimed_by_nobody(state: NodeState) -> None:
    state.engines["e1"].slots[name(1)].claimed_by = ("base", "gone")


@pytest.mark.parametrize(
    "damage", [slot_count_off, engine_count_off, lease_forgotten, drained_for_nobody, claimed_by_nobody]
)
def test_wrong_books_are_found_within_seconds_and_told_once(damage: Callable[[NodeState], None]) -> None:
    bench = Bench()
    bench.serve(1)
    bench.serve(2)
    quietly(bench, 20.0)
    assert findings(bench) == 0
    damage(bench.machine.state)
    quietly(bench, 10.0)
    found = findings(bench)
    assert found >= 1
    assert len(bench.machine.auditor.untold()) == found
    quietly(bench, 60.0)
    assert findings(bench) == found
    assert bench.machine.auditor.untold() == []
    assert full_report(bench.machine.state, epoch=1, number=1).audit_findings == found


# reports


def test_report_counts_slots_that_come_and_go_and_leases_by_adapter() -> None:
    bench = Bench(slots=3)
    bench.serve(1)
    bench.ask(1)
    bench.release(bench.serve(2))
    bench.ask(3)
    bench.fetched(3)
    (report,) = full_report(bench.machine.state, epoch=1, number=1).engines
    assert dict(zip(report.serving, report.leases, strict=True)) == {name(1): 2, name(2): 0}
    assert (report.slots, report.changing) == (3, 1)


def test_what_every_engine_refused_is_reported_as_failed_until_that_is_forgotten() -> None:
    bench = Bench(engines=2, up=False, negative_max_s=60.0)
    bench.up("e1", slots=2)
    bench.up("e2", slots=1)
    state = bench.machine.state

    def stands() -> Residency:
        known = full_report(state, epoch=1, number=1).resident[digest(1)]
        assert delta_report(state, state.changes).residency[digest(1)] is known, "it is told at once"
        state.changes = Changes()
        return known

    ask = bench.ask(1)
    bench.fetched(1)
    bench.rejected(1, "e1")
    assert stands() is Residency.INSTALLING, "the other engine may take it"
    bench.rejected(1, "e2")
    assert bench.refused(ask).outcome is Outcome.UNFIT
    assert stands() is Residency.FAILED
    bench.down("e2")
    assert stands() is Residency.FAILED
    bench.up("e2", slots=4)
    assert stands() is Residency.RESIDENT, "this life of it has not been asked"
    bench.down("e2")
    assert stands() is Residency.FAILED
    bench.up("e2", slots=1)
    assert stands() is Residency.FAILED
    bench.wait(30.0 + 61.0)
    assert stands() is Residency.RESIDENT


def test_report_tells_what_loads_take_and_how_fast_they_go() -> None:
    bench = Bench(slots=20, loads_in_flight=1)
    for number in range(12):
        bench.ask(number)
    for number in range(8):
        bench.wait(0.5)
        bench.fetched(number)
        bench.wait(1.5)
        bench.installed(number)
    report = full_report(bench.machine.state, epoch=1, number=1)
    assert report.load_s == pytest.approx(2.0)
    assert report.load_rate == pytest.approx(0.5, rel=0.3)
    assert (report.loads_limit, report.loads_in_flight, report.loads_queued) == (1, 1, 3)


def test_report_names_the_tenants_that_wait_most_and_no_more() -> None:
    bench = Bench(loads_in_flight=1, loads_queued=200)
    for tenant in range(MOST_TENANTS + 4):
        for number in range(1 + tenant % 3):
            bench.ask(number, tenant=f"t{tenant}")
    bench.ask(9, tenant="t2")
    state = bench.machine.state
    queued = full_report(state, epoch=1, number=1).queued_by_tenant
    assert len(queued) == MOST_TENANTS
    assert queued["t2"] == 4
    assert min(queued.values()) >= 1


def test_delta_tells_of_the_queue_when_it_changed() -> None:
    bench = Bench(loads_in_flight=1)
    state = bench.machine.state
    bench.ask(1)
    bench.ask(2, tenant="other")
    assert delta_report(state, state.changes).queued_by_tenant == {"other": 1}
    state.changes = Changes()
    bench.ask(None)
    assert delta_report(state, state.changes).queued_by_tenant is None
