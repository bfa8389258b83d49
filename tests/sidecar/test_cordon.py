"""A node taken out of service, and back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sidecar.cordon import CordonFile
from sidecar.events import Cordoned
from sidecar.report import delta_report, full_report
from sidecar.state import Changes
from tests.sidecar.conftest import Gateway, Store, config, running
from tests.sidecar.fake_engine import FakeBackend
from wire.node import AskState, Cordon, Granted, NodeReport, Refused
from wire.outcomes import Outcome

from .bench import Bench


def cordon(bench: Bench, *, on: bool = True) -> None:
    bench.send(Cordoned(on=on))


def test_cordoned_node_sends_newcomers_elsewhere_and_keeps_what_it_has() -> None:
    bench = Bench(slots=4)
    lease = bench.serve(1)
    loading = bench.ask(2)
    cordon(bench)
    for number in (1, 3, None):
        refused = bench.refused(bench.ask(number))
        assert (refused.outcome, refused.elsewhere) == (Outcome.NO_HEALTHY_NODE, True)
        assert "n1" in refused.message
    bench.fetched(2)
    bench.installed(2)
    assert bench.granted(loading), "a load under way goes on"
    engine = bench.machine.state.engines["e1"]
    assert engine.outstanding == 2
    bench.release(lease, loading)
    assert engine.outstanding == 0


def test_lease_that_is_asked_for_again_is_no_new_one() -> None:
    bench = Bench()
    lease = bench.serve(1)
    cordon(bench)
    assert bench.granted(bench.ask(1, lease=lease))


def test_loads_that_wait_for_their_turn_are_sent_elsewhere_at_once() -> None:
    bench = Bench(loads_in_flight=1)
    bench.ask(1)
    waiting = bench.ask(2)
    cordon(bench)
    refused = bench.refused(waiting)
    assert (refused.outcome, refused.elsewhere) == (Outcome.NO_HEALTHY_NODE, True)
    assert bench.machine.state.queue.queued == 0


def test_who_waits_for_a_slot_kept_for_another_load_gets_it_when_that_load_is_sent_elsewhere() -> None:
    bench = Bench(slots=1, slot_age_bound_s=3.0)
    bench.serve(1)
    newcomer = bench.ask(2)
    bench.wait(5.0)
    assert not bench.serving(), "kept from new leases for the newcomer"
    returning = bench.ask(1)
    cordon(bench)
    assert bench.refused(newcomer).elsewhere
    assert bench.granted(returning).waited
    assert not list(bench.machine.state.queue)


def test_node_in_service_again_takes_leases() -> None:
    bench = Bench()
    bench.release(bench.serve(1))
    cordon(bench)
    cordon(bench, on=False)
    assert bench.granted(bench.ask(1))


def test_reports_tell_of_it() -> None:
    bench = Bench()
    state = bench.machine.state
    assert not full_report(state, epoch=1, number=1).draining
    state.changes = Changes()
    cordon(bench)
    assert state.changes, "it is told soon"
    assert delta_report(state, state.changes).draining is True
    assert full_report(state, epoch=1, number=2).draining


async def test_node_stays_cordoned_over_a_restart_of_its_sidecar(sockets: Path, store: Store) -> None:
    data = b"bytes" * 1000
    name = store.put(data)
    settings = config(sockets, store)
    engine = FakeBackend()
    gateway = Gateway(settings)
    async with running(settings, engine):
        held = await gateway.ask(name, len(data))
        assert isinstance(held, Granted)
        report = await gateway.wire.request(Cordon(on=True), timeout_s=5.0)
        assert isinstance(report, NodeReport)
        assert report.draining
        assert report.engines[0].outstanding == 1
        assert report.engines[0].leases == (1,)
    async with running(settings, engine):
        refused = await gateway.ask(name, len(data))
        assert isinstance(refused, Refused)
        assert (refused.outcome, refused.elsewhere) == (Outcome.NO_HEALTHY_NODE, True)
        report = await gateway.wire.request(Cordon(on=False), timeout_s=5.0)
        assert isinstance(report, NodeReport)
        assert not report.draining
        assert isinstance(await gateway.ask(name, len(data)), Granted)
    async with running(settings, engine):
        report = await gateway.wire.request(AskState(), timeout_s=5.0)
        assert isinstance(report, NodeReport)
        assert not report.draining
    gateway.close()


def test_mark_is_on_disk_once_it_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    mark = CordonFile(str(tmp_path / "run"), "n1")
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(mark.is_set()))
    mark.set(on=False)
    assert not mark.is_set()
    mark.set(on=True)
    mark.set(on=False)
    assert synced == [True, False], "after each change"
