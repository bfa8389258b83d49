"""Leases: each counted once, each ended once, whoever disappears."""

from __future__ import annotations

import math

import pytest

from sidecar.effects import StartRemove
from sidecar.leases import Lease, LeaseTable
from wire.outcomes import Outcome

from .bench import Bench, name


def outstanding(bench: Bench, engine: str = "e1") -> int:
    return bench.machine.state.engines[engine].outstanding


def test_same_lease_asked_twice_is_one() -> None:
    bench = Bench()
    bench.serve(1)
    first, again = bench.ask(1, lease=77), bench.ask(1, lease=77)
    assert bench.granted(first) == bench.granted(again)
    assert outstanding(bench) == 2
    bench.release(77)
    assert outstanding(bench) == 1


def test_same_lease_asked_twice_while_it_waits_is_one_with_two_answers() -> None:
    bench = Bench()
    first, again = bench.ask(1, lease=77), bench.ask(1, lease=77)
    bench.loaded(1)
    assert bench.granted(first) == bench.granted(again)
    assert outstanding(bench) == 1


def test_lease_number_in_use_for_another_revision_is_refused() -> None:
    bench = Bench()
    bench.serve(1)
    bench.ask(1, lease=77)
    assert bench.refused(bench.ask(2, lease=77)).outcome is Outcome.INVALID_REQUEST
    bench.ask(3, lease=78)
    assert bench.refused(bench.ask(4, lease=78)).outcome is Outcome.INVALID_REQUEST


def test_leases_of_two_gateways_with_one_number_are_two() -> None:
    bench = Bench()
    bench.serve(1)
    bench.ask(1, lease=5, gateway="g2")
    bench.ask(1, lease=5, gateway="g3")
    bench.release(5, gateway="g2")
    bench.release(5, gateway="g2")
    assert outstanding(bench) == 2


def test_unknown_release_is_counted_and_ignored() -> None:
    bench = Bench()
    lease = bench.serve(1)
    bench.release(lease, 999)
    bench.release(lease)
    assert outstanding(bench) == 0
    assert bench.machine.state.counts["releases_unknown"] == 2


def test_restarted_gateway_loses_what_its_former_life_held_and_waited_for() -> None:
    bench = Bench()
    bench.serve(1)
    waiting = bench.ask(2)
    other = bench.ask(2, gateway="g2")
    bench.alive("g1", "i1")
    assert outstanding(bench) == 1
    bench.alive("g1", "i2")
    assert outstanding(bench) == 0
    assert bench.refused(waiting).outcome is Outcome.CLIENT_GONE
    bench.loaded(2)
    assert bench.granted(other)


def test_restarted_gateways_first_asks_stand_whichever_message_of_it_comes_first() -> None:
    bench = Bench()
    former = bench.serve(1)
    waiting = bench.ask(2)
    hot, cold = bench.ask(1, instance="i2"), bench.ask(2, instance="i2")
    assert bench.granted(hot)
    assert bench.refused(waiting).outcome is Outcome.CLIENT_GONE
    assert outstanding(bench) == 1
    bench.alive("g1", "i2")
    assert outstanding(bench) == 1
    bench.release(former)
    bench.loaded(2)
    assert bench.granted(cold)
    bench.release(hot, cold, instance="i2")
    assert outstanding(bench) == 0
    assert bench.machine.state.counts["gateway_restarts"] == 1


def test_release_may_be_the_first_word_of_a_new_life() -> None:
    bench = Bench()
    bench.serve(1)
    bench.release(instance="i2")
    assert outstanding(bench) == 0


def test_late_messages_of_a_former_life_take_nothing_and_void_nothing() -> None:
    bench = Bench()
    bench.serve(1)
    lease = bench.ask(1, instance="i2")
    refused = bench.refused(bench.ask(1, instance="i1"))
    assert (refused.outcome, refused.elsewhere) == (Outcome.NO_HEALTHY_NODE, False)
    bench.alive("g1", "i1")
    bench.release(lease, instance="i1")
    assert outstanding(bench) == 1
    bench.release(lease, instance="i2")
    assert outstanding(bench) == 0


def test_lease_is_granted_to_a_gateway_that_was_silent_while_it_waited() -> None:
    bench = Bench(gateway_silence_s=5.0)
    ask = bench.ask(1)
    bench.wait(10.0)
    bench.loaded(1)
    assert bench.granted(ask)
    bench.alive("g1", "i1")
    assert outstanding(bench) == 1


def test_silent_gateway_loses_its_leases_and_a_talking_one_keeps_them() -> None:
    bench = Bench(gateway_silence_s=15.0)
    bench.serve(1)
    bench.ask(1, gateway="g2")
    for _ in range(10):
        bench.wait(2.0)
        bench.alive("g2")
    assert outstanding(bench) == 1
    assert bench.machine.state.counts["leases_of_silent_gateways"] == 1


def test_time_in_which_we_were_stopped_is_nobodys_silence() -> None:
    bench = Bench(gateway_silence_s=15.0)
    bench.serve(1)
    bench.wait(1.0)
    bench.wait(60.0, step=60.0)
    assert outstanding(bench) == 1


def test_lease_ends_with_its_time_to_live() -> None:
    bench = Bench()
    bench.serve(1)
    bench.ask(1, lease=50, ttl_s=10.0)
    for _ in range(12):
        bench.alive("g1")
        bench.wait(1.0)
    assert outstanding(bench) == 1
    assert bench.machine.state.counts["leases_expired"] == 1


def test_lease_asked_again_lives_longer() -> None:
    bench = Bench()
    bench.serve(1)
    for _ in range(12):
        bench.ask(1, lease=50, ttl_s=3.0)
        bench.wait(1.0)
    assert outstanding(bench) == 2


def test_lost_lease_keeps_its_slot_for_a_while_where_the_engine_cannot_say_busy() -> None:
    bench = Bench(up=False, gateway_silence_s=5.0, lost_lease_hold_s=30.0, slot_age_bound_s=1000.0)
    bench.up(slots=1, removes_for_real=False)
    bench.serve(1)
    bench.wait(10.0)
    assert outstanding(bench) == 0
    bench.ask(2, gateway="g2", wait_s=600.0)
    bench.wait(10.0)
    assert not bench.fetches
    bench.wait(30.0)
    bench.fetched(2)
    assert isinstance(bench.calls["e1"], StartRemove)


def test_death_of_an_engine_voids_its_leases_only() -> None:
    bench = Bench(engines=2, up=False)
    bench.up("e1", installed=(name(1),))
    bench.up("e2", installed=(name(2),))
    first, second = bench.ask(1), bench.ask(2)
    bench.down("e1")
    assert (outstanding(bench, "e1"), outstanding(bench, "e2")) == (0, 1)
    bench.release(first, second)
    assert outstanding(bench, "e2") == 0


def test_table_refuses_a_second_lease_of_one_key() -> None:
    table = LeaseTable(15.0)
    lease = Lease("g1", 1, "e1", "", "")
    table.add(lease, "i1", 10.0, 0.0)
    with pytest.raises(KeyError):
        table.add(lease, "i1", 10.0, 0.0)


@pytest.mark.parametrize("ttl_s", [math.nan, math.inf, 0.0, -1.0])
def test_lease_that_would_never_end_or_has_ended_is_refused(ttl_s: float) -> None:
    bench = Bench()
    lease = bench.serve(1)
    for ask in (bench.ask(1, ttl_s=ttl_s), bench.ask(2, ttl_s=ttl_s), bench.ask(1, lease=lease, ttl_s=ttl_s)):
        refused = bench.refused(ask)
        assert (refused.outcome, refused.field) == (Outcome.INVALID_REQUEST, "ttl_s")
    assert len(bench.machine.state.leases) == 1
    assert not bench.fetches
