"""Engines that pace loads themselves: many calls at once, whose loads hold no permit once their bytes are there."""

from __future__ import annotations

import msgspec

from sidecar.effects import AnyEffect, EngineCall, ReadInstalled, StartInstall, StartRemove
from sidecar.events import EngineUp, InstallDone, RemoveDone
from sidecar.report import full_report
from wire.outcomes import Outcome

from .bench import Bench, Removal, digest, limits, name

AT_ONCE = 4


class Pacing(Bench):
    """An engine that takes AT_ONCE calls; ``sent`` are those under way, the oldest first."""

    def __init__(self, slots: int = 16, **changes: object) -> None:
        self.sent: list[EngineCall] = []
        super().__init__(up=False, loads_in_flight=2, **changes)
        can = msgspec.structs.replace(limits(slots), calls_at_once=AT_ONCE)
        self.send(EngineUp(engine="e1", limits=can, installed=frozenset(), host="h", port=1))

    def ask_for(self, *numbers: int) -> list[int]:
        asks = [self.ask(number) for number in numbers]
        self.fetch_all()
        return asks

    def fetch_all(self) -> None:
        while self.fetches:
            self.now += 0.001
            self.fetched(int(next(iter(self.fetches)), 16))

    def end(self, number: int, removal: Removal = Removal.REMOVED) -> None:
        """The call about adapter ``number`` ends well."""
        call = next(one for one in self.sent if getattr(one, "adapter", "") == name(number))
        self.sent.remove(call)
        if isinstance(call, StartRemove):
            self.send(RemoveDone(engine="e1", op=call.op, removal=removal))
        else:
            self.send(InstallDone(engine="e1", op=call.op))

    def about(self, kind: type[EngineCall]) -> list[str]:
        return [
            call.adapter for call in self.sent if isinstance(call, StartInstall | StartRemove) and type(call) is kind
        ]

    def _note(self, effect: AnyEffect) -> None:
        if isinstance(effect, EngineCall):
            self.history.append(effect)
            self.sent.append(effect)
        else:
            super()._note(effect)


def test_an_engine_gets_as_many_loads_as_it_takes_and_the_next_when_one_ends() -> None:
    bench = Pacing()
    asks = bench.ask_for(*range(8))
    assert bench.about(StartInstall) == [name(number) for number in range(AT_ONCE)]
    for number in (2, 0):
        bench.end(number)
        bench.granted(asks[number])
        bench.fetch_all()
    assert bench.about(StartInstall) == [name(number) for number in (1, 3, 4, 5)]
    for number in (1, 3, 4, 5, 6, 7):
        bench.end(number)
        bench.fetch_all()
    assert all(bench.granted(ask) for ask in asks)


def test_reports_tell_how_many_may_run_at_once() -> None:
    assert full_report(Pacing().machine.state, epoch=1, number=1).loads_limit == 2 + AT_ONCE


def test_a_step_that_is_waited_for_is_no_reason_to_load_less_at_once() -> None:
    bench = Pacing(slots=64, loads_in_flight_min=1)
    for first in range(0, 32, 4):
        bench.ask_for(*range(first, first + 4))
        bench.now += 0.01 if first < 8 else 3.0
        for number in range(first, first + 4):
            bench.end(number)
    assert bench.machine.state.queue.limit == 2


def test_bytes_that_come_slower_together_are_one() -> None:
    bench, found = Pacing(slots=64, loads_in_flight_min=1), []
    for first in range(0, 32, 2):
        for number in (first, first + 1):
            bench.ask(number)
        bench.now += 0.01 if first < 4 else 3.0
        bench.fetch_all()
        for number in (first, first + 1):
            bench.end(number)
        found.append(bench.machine.state.queue.limit)
    assert (found[0], min(found)) == (2, 1)


def test_removals_and_installs_are_under_way_together() -> None:
    bench = Pacing(slots=2, min_residency_s=0.0)
    for ask, number in zip(bench.ask_for(0, 1), (0, 1), strict=True):
        bench.end(number)
        bench.release(ask)
    bench.now += 100.0
    asks = bench.ask_for(2, 3)
    assert sorted(bench.about(StartRemove)) == [name(0), name(1)]
    bench.end(0)
    assert bench.about(StartInstall) == [name(2)]
    bench.end(1, Removal.BUSY)
    bench.end(2)
    bench.granted(asks[0])
    assert asks[1] not in bench.answers


def test_what_an_engine_has_is_read_while_nothing_changes_it() -> None:
    bench = Pacing(loads_in_flight_min=2)
    bench.wait(10.0)
    (read,) = bench.sent
    assert isinstance(read, ReadInstalled)
    bench.ask_for(0, 1)
    assert bench.sent == [read]


def test_of_many_loads_that_were_under_way_when_the_engine_died_the_oldest_is_suspected() -> None:
    bench = Pacing()
    asks = bench.ask_for(0, 1, 2)
    bench.down()
    assert bench.refused(asks[0]).outcome is Outcome.ENGINE_FAILED
    assert {bench.refused(ask).outcome for ask in asks[1:]} == {Outcome.NO_HEALTHY_NODE}
    assert bench.machine.state.broken.blocked((digest(0), "e1"), bench.now) is not None
    assert bench.machine.state.broken.blocked((digest(1), "e1"), bench.now) is None
