"""After a crash of either side the books of both are one again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.effects import StartRemove
from sidecar.events import GatewayHolds
from tests.sidecar.conftest import Gateway, Store, config, running, until
from tests.sidecar.fake_engine import FakeBackend
from wire.node import Granted, HeldLease, Holding
from wire.outcomes import Outcome

from .bench import Bench, name


def holds(
    bench: Bench,
    *leases: HeldLease,
    gateway: str = "g1",
    instance: str = "i1",
    asked: tuple[int, ...] = (),
    newest: int = 1000,
) -> None:
    holding = Holding(gateway=gateway, instance=instance, leases=leases, asked=asked, newest=newest)
    bench.send(GatewayHolds(holding=holding))


def held(lease: int, number: int | None = 1, engine: str = "e1", ttl_s: float = 60.0) -> HeldLease:
    return HeldLease(lease, engine, "" if number is None else name(number), ttl_s)


def outstanding(bench: Bench, engine: str = "e1") -> int:
    return bench.machine.state.engines[engine].outstanding


def test_new_sidecar_counts_what_gateways_still_hold_on_its_engines() -> None:
    bench = Bench(up=False)
    bench.up(slots=2, installed=(name(1), name(2)))
    holds(bench, held(7), held(8), held(9, number=None))
    assert outstanding(bench) == 3
    # the one that nobody holds makes room
    bench.ask(3)
    bench.fetched(3)
    assert bench.removing() == name(2)
    bench.removed(2)
    bench.installed(3)
    bench.release(7, 8, 9)
    assert outstanding(bench) == 1
    assert bench.machine.state.counts["leases_adopted"] == 3
    assert bench.machine.state.counts["releases_unknown"] == 0


def test_held_lease_asked_for_again_is_the_same_one() -> None:
    bench = Bench(up=False)
    bench.up(installed=(name(1),))
    holds(bench, held(7))
    holds(bench, held(7))
    assert bench.granted(bench.ask(1, lease=7)).engine == "e1"
    assert outstanding(bench) == 1


def test_adopted_lease_ends_with_its_time_to_live() -> None:
    bench = Bench(up=False)
    bench.up(installed=(name(1),))
    holds(bench, held(7, ttl_s=5.0))
    for _ in range(10):
        bench.alive()
        bench.wait(1.0)
    assert outstanding(bench) == 0


def test_lease_on_what_is_not_there_any_more_is_not_counted() -> None:
    bench = Bench(engines=2, up=False)
    bench.up("e1", installed=(name(1),))
    holds(bench, held(7, number=2), held(8, engine="e2"), held(9, engine="e9"), HeldLease(10, "e1", "odd", 60.0))
    assert outstanding(bench) == 0
    assert bench.machine.state.counts["leases_not_adopted"] == 4


def test_lost_release_is_made_up_for_and_nothing_else_is_touched() -> None:
    bench = Bench(slots=2)
    lost, kept = bench.serve(1), bench.ask(1)
    other = bench.ask(1, gateway="g2")
    waiting = bench.ask(2)
    bench.ask(1, lease=2000)
    holds(bench, held(kept), asked=(waiting,), newest=1999)
    assert outstanding(bench) == 3, f"all but {lost}"
    bench.fetched(2)
    bench.installed(2)
    assert bench.granted(waiting)
    bench.release(kept, waiting, 2000)
    bench.release(other, gateway="g2")
    assert outstanding(bench) == 0
    assert bench.machine.state.counts["leases_given_back_unheard"] == 1
    assert bench.machine.state.counts["releases_unknown"] == 0


def test_slot_of_a_lost_release_can_be_given_to_a_load_that_waits_for_it() -> None:
    bench = Bench(slots=1)
    bench.serve(1)
    waiting = bench.ask(2)
    assert not bench.fetches
    holds(bench, asked=(waiting,))
    bench.fetched(2)
    bench.removed(1)
    bench.installed(2)
    assert bench.granted(waiting)


def test_waiter_whose_gateway_waits_no_more_is_withdrawn() -> None:
    bench = Bench(loads_in_flight=1)
    bench.ask(1)
    waiting = bench.ask(2)
    holds(bench, asked=(1,))
    assert bench.refused(waiting).outcome is Outcome.CLIENT_GONE
    assert bench.machine.state.queue.queued == 0


def test_leases_of_a_gateway_that_was_taken_for_dead_come_back() -> None:
    bench = Bench(gateway_silence_s=5.0)
    lease = bench.serve(1)
    bench.wait(10.0)
    assert outstanding(bench) == 0
    holds(bench, held(lease))
    assert outstanding(bench) == 1


def test_word_of_a_former_life_changes_nothing() -> None:
    bench = Bench()
    bench.serve(1)
    lease = bench.ask(1, instance="i2")
    holds(bench, instance="i1")
    assert outstanding(bench) == 1
    bench.release(lease, instance="i2")


def test_engine_that_cannot_say_busy_keeps_adopted_adapters_for_a_while() -> None:
    """Requests of before the restart may use them, and their gateway may not have said so yet."""
    bench = Bench(up=False, lost_lease_hold_s=10.0, slot_age_bound_s=1000.0)
    bench.up(slots=1, installed=(name(1),), removes_for_real=False)
    ask = bench.ask(2, wait_s=600.0)
    bench.wait(5.0)
    assert not bench.fetches
    bench.wait(10.0)
    bench.fetched(2)
    bench.removed(1)
    bench.installed(2)
    assert bench.granted(ask)


def adopted(bench: Bench, *numbers: int) -> None:
    """An engine that can't say busy, as a new sidecar finds it: its slots are full."""
    bench.up(slots=len(numbers), installed=tuple(map(name, numbers)), removes_for_real=False)


def test_adopted_adapter_that_nobody_holds_makes_room_once_every_gateway_has_told() -> None:
    bench = Bench(up=False)
    holds(bench, gateway="g1")
    adopted(bench, 1, 2)
    bench.alive("g2")
    newcomer = bench.ask(3)
    for second in range(30):
        bench.alive("g1")
        bench.alive("g2")
        bench.wait(1.0)
        if second == 19:
            assert not bench.fetches, "g2 has not said what it holds"
            holds(bench, held(7, number=1), gateway="g2")
    bench.fetched(3)
    bench.removed(2)
    bench.installed(3)
    assert bench.granted(newcomer)


def test_adopted_adapters_are_kept_while_no_gateway_was_heard_to_tell() -> None:
    bench = Bench(up=False, lost_lease_hold_s=50.0, slot_age_bound_s=1000.0)
    adopted(bench, 1)
    newcomer = bench.ask(2, wait_s=600.0)
    for _ in range(45):
        bench.alive()
        bench.wait(1.0)
    assert not bench.fetches
    bench.wait(10.0)
    bench.fetched(2)
    bench.removed(1)
    bench.installed(2)
    assert bench.granted(newcomer)


@given(
    users=st.lists(st.sets(st.sampled_from(("g1", "g2", "g3"))), min_size=2, max_size=2),
    told_at=st.lists(st.integers(0, 14), min_size=3, max_size=3),
    up_at=st.integers(0, 10),
)
def test_nothing_is_removed_that_a_gateway_uses_whenever_it_tells(
    users: list[set[str]], told_at: list[int], up_at: int
) -> None:
    """Each gateway is heard within the bound on silence, and tells what it holds then and every 30 s."""
    bench = Bench(up=False, slot_age_bound_s=1000.0)
    for second in range(46):
        for gateway, first in zip(("g1", "g2", "g3"), told_at, strict=True):
            if second >= first:
                bench.alive(gateway)
            if second >= first and (second - first) % 30 == 0:
                leases = (held(number, number=number) for number, using in enumerate(users, 1) if gateway in using)
                holds(bench, *leases, gateway=gateway)
        if second == up_at:
            adopted(bench, 1, 2)
            bench.ask(3, lease=5000, wait_s=600.0)
        bench.wait(1.0)
        if bench.fetches:
            bench.fetched(3)
    unused = {name(number) for number, using in enumerate(users, 1) if not using}
    removed = {call.adapter for call in bench.started(StartRemove) if isinstance(call, StartRemove)}
    assert removed <= unused
    assert bool(removed) == bool(unused), "long before the hold would have ended"


async def test_restarted_sidecar_is_told_over_its_socket(sockets: Path, store: Store) -> None:
    data = b"bytes" * 1000
    digest = store.put(data)
    settings = config(sockets, store)
    engine = FakeBackend()
    gateway = Gateway(settings)
    async with running(settings, engine):
        answer = await gateway.ask(digest, len(data))
        assert isinstance(answer, Granted)
    async with running(settings, engine) as sidecar:
        await gateway.connect()
        lease = HeldLease(answer.lease, answer.engine, answer.adapter, 60.0)
        gateway.wire.send(Holding(gateway="g1", instance="i1", leases=(lease,), newest=answer.lease))
        await until(lambda: sidecar.machine.state.engines["e1"].outstanding == 1)
        gateway.wire.send(Holding(gateway="g1", instance="i1", leases=(), newest=answer.lease))
        await until(lambda: sidecar.machine.state.engines["e1"].outstanding == 0)
    gateway.close()


@pytest.mark.parametrize("ttl_s", [math.nan, math.inf, 0.0, -1.0])
def test_held_lease_that_would_never_end_or_has_ended_is_not_adopted(ttl_s: float) -> None:
    bench = Bench(up=False)
    bench.up(installed=(name(1),))
    holds(bench, held(7, ttl_s=ttl_s))
    assert outstanding(bench) == 0
    assert bench.machine.state.counts["leases_not_adopted"] == 1
