"""Engines that start, are adopted, die and return."""

from __future__ import annotations

import msgspec
import pytest

from backends.interface import Health
from sidecar.effects import StartFetch
from sidecar.events import EngineDown, EngineRemarked, EngineUp, InstallDone, Tick
from sidecar.report import engine_report, full_report
from sidecar.state import Changes
from wire.node import Residency
from wire.outcomes import Outcome

from .bench import Bench, digest, limits, name


def test_an_engine_that_starts_reports_the_rank_that_it_will_take() -> None:
    """Else a gateway would tell clients that their revision never fits, while the engine is only not there yet."""
    bench = Bench(up=False)
    told = [engine_report(engine).max_rank for engine in bench.machine.state.engines.values()]
    bench.up()
    bench.down()
    told += [engine_report(engine).max_rank for engine in bench.machine.state.engines.values()]
    assert min(told) == max(told) > 0


def test_people_are_told_of_an_engines_process_and_its_lives() -> None:
    bench = Bench(up=False)

    def told() -> tuple[int, float, int, str]:
        report = engine_report(bench.machine.state.engines["e1"])
        return report.pid, report.since, report.restarts, report.detail

    up = EngineUp(engine="e1", limits=limits(2), installed=frozenset(), host="h", port=1, pid=77, at=1000.0)
    bench.send(up)
    assert told() == (77, 1000.0, 0, "")
    bench.send(EngineRemarked(engine="e1", detail="busy"))
    assert told() == (77, 1000.0, 0, "busy")
    bench.send(EngineDown(engine="e1", health=Health.DEAD, detail="killed", at=2000.0))
    assert told() == (0, 2000.0, 0, "killed")
    bench.send(EngineDown(engine="e1", health=Health.STARTING, detail="killed", at=2001.0))
    bench.send(EngineRemarked(engine="e1", detail="too late"))
    assert told() == (0, 2001.0, 1, "killed")
    bench.send(msgspec.structs.replace(up, pid=78, at=2010.0))
    assert told() == (78, 2010.0, 1, "")


def test_adopted_adapters_serve_without_a_load() -> None:
    bench = Bench(up=False)
    bench.up(installed=(name(1), name(2, "other")))
    assert not bench.granted(bench.ask(1)).waited
    assert not bench.granted(bench.ask(2, tenant="other")).waited
    assert not bench.fetches


def test_adapters_that_served_come_back_from_the_arena() -> None:
    bench = Bench(slots=2)
    bench.serve(1)
    bench.release(bench.serve(2))
    bench.wait(1.0)
    bench.down()
    bench.up()
    bench.installed(1)
    bench.installed(2)
    assert len(bench.started(StartFetch)) == 2, "both from the first time"
    assert bench.serving() == {name(1), name(2)}


def test_what_comes_back_takes_no_slot_from_what_is_asked_for() -> None:
    bench = Bench(slots=1, loads_in_flight=1)
    bench.release(bench.serve(1))
    bench.down()
    bench.up(slots=1)
    ask = bench.ask(2)
    bench.installed(1)
    bench.fetched(2)
    bench.removed(1)
    bench.installed(2)
    assert bench.granted(ask)


def test_ask_for_what_is_coming_back_waits_for_that() -> None:
    bench = Bench()
    bench.serve(1)
    bench.down()
    bench.up()
    ask = bench.ask(1)
    bench.installed(1)
    assert bench.granted(ask).waited


def test_death_refuses_waiters_when_no_engine_of_the_base_is_left() -> None:
    bench = Bench(loads_in_flight=1)
    fetching, queued = bench.ask(1), bench.ask(2)
    bench.down()
    for ask in (fetching, queued):
        refused = bench.refused(ask)
        assert (refused.outcome, refused.elsewhere) == (Outcome.NO_HEALTHY_NODE, True)
    bench.fetched(1)
    assert bench.machine.state.queue.queued == bench.machine.state.queue.in_flight == 0


@pytest.mark.parametrize(
    "detail", ["it ended; its log:\n/secret/path: Traceback", "nobody answers at http://secret:80"]
)
def test_what_clients_are_told_of_a_death_is_no_word_of_its_detail(detail: str) -> None:
    bench = Bench()
    installing, waiting = bench.ask(1), bench.ask(2)
    bench.fetched(1)
    bench.install_of(1)
    bench.send(EngineDown(engine="e1", health=Health.DEAD, detail=detail))
    for ask in (installing, waiting, bench.ask(1), bench.ask(3)):
        message = bench.refused(ask).message
        assert "failed" in message
        assert not any(word in message for word in ("ended", "secret", "Traceback", "nobody", "http"))
    assert bench.machine.state.engines["e1"].detail == detail, "it is what operators see"


def test_what_clients_are_told_of_a_failed_install_is_no_word_of_the_engine() -> None:
    for end, words in ((Bench.broke, "no memory"), (Bench.unsure, "no answer")):
        bench = Bench()
        ask = bench.ask(1)
        bench.fetched(1)
        end(bench, 1)
        refused = bench.refused(ask)
        assert refused.outcome is Outcome.ENGINE_FAILED
        assert "trying again may help" in refused.message
        assert words not in refused.message
        if end is Bench.broke:
            assert words not in bench.refused(bench.ask(1)).message


def test_death_during_a_fetch_sends_the_load_to_another_engine() -> None:
    bench = Bench(engines=2)
    ask = bench.ask(1)
    bench.down("e1")
    bench.loaded(1, "e2")
    assert bench.granted(ask).engine == "e2"


def test_an_adapter_that_an_engine_died_with_is_loaded_by_the_nodes_other_engine() -> None:
    bench = Bench(engines=2)
    ask = bench.ask(1)
    bench.fetched(1)
    bench.install_of(1)
    bench.down("e1")
    late = bench.ask(1)
    bench.installed(1, "e2")
    assert {bench.granted(asked).engine for asked in (ask, late, bench.ask(1))} == {"e2"}


def test_an_adapter_that_every_engine_died_with_is_tried_on_other_nodes_and_here_after_a_while() -> None:
    bench = Bench(engines=2, negative_first_s=10.0)
    ask = bench.ask(1)
    bench.fetched(1)
    for engine in ("e1", "e2"):
        bench.install_of(1, engine)
        bench.down(engine)
    refused = bench.refused(ask)
    assert (refused.outcome, refused.elsewhere) == (Outcome.ENGINE_FAILED, True)
    bench.up("e1")
    bench.up("e2")
    again = bench.refused(bench.ask(1))
    assert (again.outcome, again.elsewhere, again.retry_after_s) == (Outcome.KNOWN_BAD, True, 10.0)
    assert full_report(bench.machine.state, epoch=1, number=1).resident[digest(1)] is Residency.FAILED
    bench.serve(2)
    bench.wait(10.0)
    later = bench.ask(1)
    bench.installed(1, "e2")
    assert bench.granted(later)


def test_a_death_is_remembered_of_the_engine_that_died() -> None:
    """It restarts, and the adapter that may have killed it goes to the other one, which had been away."""
    bench = Bench(engines=2, negative_first_s=10.0)
    bench.down("e2")
    ask = bench.ask(1)
    bench.fetched(1)
    bench.install_of(1)
    bench.down("e1")
    refused = bench.refused(ask)
    assert (refused.outcome, refused.elsewhere) == (Outcome.ENGINE_FAILED, True)
    bench.up("e1")
    assert bench.refused(bench.ask(1)).outcome is Outcome.KNOWN_BAD
    bench.up("e2")
    again = bench.ask(1)
    bench.installed(1, "e2")
    assert bench.granted(again).engine == "e2"


def test_who_lost_an_engine_that_is_not_known_to_be_dead_yet_gets_another() -> None:
    bench = Bench(engines=2)
    first = bench.granted(bench.serve(1))
    other = {"e1": "e2", "e2": "e1"}[first.engine]
    assert bench.granted(bench.ask(None, failed_engine=first.engine)).engine == other
    bench.release(first.lease)
    again = bench.ask(1, failed_engine=first.engine)
    bench.installed(1, other)
    assert bench.granted(again).engine == other
    assert bench.granted(bench.ask(1, failed_engine=first.engine)).engine == other


def test_who_lost_the_only_engine_gets_it_once_more() -> None:
    bench = Bench(engines=2)
    bench.down("e2")
    bench.serve(1)
    for number in (1, None):
        assert bench.granted(bench.ask(number, failed_engine="e1")).engine == "e1"


def test_load_whose_install_was_not_sent_yet_goes_on_elsewhere() -> None:
    bench = Bench(engines=2, loads_in_flight=2, up=False)
    bench.up("e1", slots=2)
    bench.ask(1)
    ask = bench.ask(2)
    bench.fetched(1)
    bench.fetched(2)
    bench.up("e2", slots=2)
    bench.down("e1")
    bench.installed(1, "e2")
    bench.installed(2, "e2")
    assert bench.granted(ask).engine == "e2"


def test_call_of_a_former_life_says_nothing_of_this_one_but_holds_its_bytes_until_it_ends() -> None:
    bench = Bench(slots=1, arena_bytes=12_288)
    bench.ask(1)
    bench.fetched(1)
    late = bench.install_of(1)
    bench.down()
    bench.up()
    ask = bench.ask(2, wait_s=600.0)
    bench.wait(20.0)
    assert digest(2) not in bench.fetches, "the old call may still be reading the arena"
    bench.send(InstallDone(engine="e1", op=late.op))
    assert bench.serving() == set()
    bench.loaded(2)
    assert bench.granted(ask)


def test_death_while_a_slot_is_cleared() -> None:
    bench = Bench(engines=2, up=False)
    bench.up("e1", slots=1)
    bench.release(bench.serve(1))
    ask = bench.ask(2)
    bench.fetched(2)
    bench.up("e2", slots=1)
    bench.down("e1")
    bench.installed(2, "e2")
    assert bench.granted(ask).engine == "e2"


def test_install_of_an_earlier_sidecar_that_ended_late_is_found() -> None:
    bench = Bench(slots=1)
    bench.now += 6.0
    bench.send(Tick())
    bench.read({name(1)})
    assert not bench.granted(bench.ask(1)).waited


def test_adapter_that_somebody_took_away_is_loaded_again() -> None:
    bench = Bench()
    lease = bench.serve(1)
    bench.now += 6.0
    bench.send(Tick())
    bench.read(set())
    ask = bench.ask(1)
    assert ask not in bench.answers
    bench.installed(1)
    assert bench.granted(ask).waited
    bench.release(lease, ask)


STRANGERS = ("base-lora", "another")


def test_adapters_of_strangers_take_slots_of_an_engine() -> None:
    bench = Bench(up=False)
    bench.up(slots=3, installed=STRANGERS)
    engine = bench.machine.state.engines["e1"]
    assert (engine.free_slots, engine_report(engine).slots) == (1, 1)
    bench.release(bench.serve(1))
    ask = bench.ask(2)
    bench.fetched(2)
    bench.removed(1)
    bench.installed(2)
    assert bench.granted(ask)
    assert bench.serving() == {name(2)}, "the strangers' slots are not ours to take"


def test_strangers_that_come_and_go_are_counted_again() -> None:
    bench = Bench(slots=2)
    engine = bench.machine.state.engines["e1"]
    for names, free in ((set(STRANGERS), 0), ({STRANGERS[0]}, 1), (set(), 2)):
        bench.now = engine.read_at
        bench.machine.state.changes = Changes()
        bench.send(Tick())
        bench.read(names)
        assert engine.free_slots == free
        assert "e1" in bench.machine.state.changes.engines, "gateways are told"


def test_a_lease_carries_the_engines_token_and_reports_do_not() -> None:
    bench = Bench(up=False)
    bench.up(token="engine secret")
    assert bench.granted(bench.ask(None)).token == "engine secret"
    told = msgspec.json.encode([full_report(bench.machine.state, epoch=1, number=1)])
    assert b"secret" not in told


def test_a_lease_tells_what_kind_of_engine_is_to_be_asked() -> None:
    bench = Bench(engines=2)
    second = bench.machine.state.engines["e2"]
    second.settings = msgspec.structs.replace(second.settings, backend="sglang")
    granted = [bench.granted(bench.ask(None)) for _ in range(4)]
    assert {lease.engine: lease.backend for lease in granted} == {"e1": "vllm", "e2": "sglang"}


def test_base_is_not_asked_of_an_engine_that_mixes_it_up_with_adapters() -> None:
    bench = Bench(up=False)
    bench.up(serves_base=False)
    refused = bench.refused(bench.ask(None))
    assert (refused.outcome, refused.elsewhere) == (Outcome.BASE_NOT_DEPLOYED, True)
    assert "not the base itself" in refused.message
    bench.serve(1)


def test_base_is_asked_of_the_engine_that_can() -> None:
    bench = Bench(engines=2, up=False)
    bench.up("e1", serves_base=False)
    bench.up("e2")
    assert [bench.granted(bench.ask(None)).engine for _ in range(3)] == ["e2"] * 3
