"""Fetching ahead: what is offered for policies that the node holds, and only while nobody waits for anything."""

from __future__ import annotations

from sidecar.effects import CancelFetch
from sidecar.events import Cordoned, RevisionOffered
from wire.outcomes import Outcome

from .bench import SIZE, TENANT, Bench, digest, name


def offer(bench: Bench, number: int, policy: str = f"{TENANT}/p") -> None:
    bench.send(RevisionOffered(policy=policy, digest=digest(number), size=SIZE))


def cancelled(bench: Bench) -> list[str]:
    return [effect.digest for effect in bench.history if isinstance(effect, CancelFetch)]


def resident(bench: Bench, number: int) -> bool:
    return bench.machine.state.cache.resident(digest(number))


def some_limit(bench: Bench) -> int:
    """Have a load take its time, so that there is a limit that could fall."""
    bench.ask(1)
    bench.wait(1.0)
    bench.loaded(1)
    assert bench.machine.state.queue.limit > 1
    return bench.machine.state.queue.limit


def test_new_revision_of_a_policy_that_is_held_is_there_before_it_is_asked_for() -> None:
    bench = Bench()
    bench.release(bench.serve(1))
    offer(bench, 2)
    bench.fetched(2)
    assert resident(bench, 2)
    ask = bench.ask(2)
    assert not bench.fetches
    bench.installed(2)
    assert bench.granted(ask).adapter == name(2)


def test_what_this_node_does_not_hold_is_not_fetched() -> None:
    bench = Bench()
    offer(bench, 2)
    bench.release(bench.serve(1))
    offer(bench, 2, policy="other/p")
    bench.wait(5.0)
    assert not bench.fetches


def test_newer_offer_replaces_the_one_that_has_not_begun() -> None:
    bench = Bench()
    bench.serve(1)
    waiting = bench.ask(3)
    offer(bench, 4)
    offer(bench, 5)
    bench.loaded(3)
    assert bench.granted(waiting)
    bench.wait(1.0)
    assert list(bench.fetches) == [digest(5)]


def test_load_takes_the_bandwidth_from_a_prefetch_which_begins_again_when_there_is_an_offer() -> None:
    bench = Bench()
    bench.serve(1)
    offer(bench, 2)
    waiting = bench.ask(3)
    assert cancelled(bench) == [digest(2)]
    assert set(bench.fetches) == {digest(2), digest(3)}, "the load does not wait for the end of the other"
    bench.fetch_cancelled(2)
    bench.loaded(3)
    assert bench.granted(waiting)
    offer(bench, 2)
    bench.wait(1.0)
    bench.fetched(2)
    assert resident(bench, 2)


def test_a_cancelled_prefetch_is_no_failure_of_the_revision() -> None:
    bench = Bench(slots=3)
    bench.serve(1)
    offer(bench, 2)
    bench.ask(3)
    asked = bench.ask(2)
    bench.fetch_cancelled(2)
    assert asked not in bench.answers
    bench.loaded(2)
    assert bench.granted(asked).adapter == name(2)
    assert digest(2) not in bench.machine.state.failures


def test_a_prefetch_that_failed_is_no_failure_for_who_asks() -> None:
    bench = Bench()
    bench.release(bench.serve(1))
    offer(bench, 2)
    bench.fetch_failed(2)
    ask = bench.ask(2)
    bench.loaded(2)
    assert bench.granted(ask)


def test_a_prefetch_that_hangs_changes_nothing_for_loads_of_other_revisions() -> None:
    bench = Bench(slots=8, loads_in_flight=8, loads_in_flight_min=1)
    limit = some_limit(bench)
    offer(bench, 2)
    bench.fetch_overdue(2)
    assert bench.machine.state.queue.limit == limit
    assert bench.refused(bench.ask(2)).elsewhere, "this node waits for its own storage"
    bench.fetch_failed(2)
    ask = bench.ask(2)
    bench.loaded(2)
    assert bench.granted(ask)


def test_a_prefetch_that_a_load_waits_for_and_hangs_is_a_load_that_hangs() -> None:
    bench = Bench(slots=8, loads_in_flight=8, loads_in_flight_min=1)
    limit = some_limit(bench)
    offer(bench, 2)
    ask = bench.ask(2)
    bench.fetch_overdue(2)
    assert bench.refused(ask).outcome is Outcome.DEADLINE
    assert bench.machine.state.queue.limit < limit
    bench.fetch_failed(2)
    assert bench.refused(bench.ask(2)).outcome is Outcome.KNOWN_BAD


def test_load_of_the_very_revision_goes_on_with_its_prefetch() -> None:
    bench = Bench()
    bench.serve(1)
    offer(bench, 2)
    ask = bench.ask(2)
    bench.ask(3)
    assert cancelled(bench) == []
    bench.loaded(2)
    assert bench.granted(ask).adapter == name(2)


def test_one_prefetch_at_a_time() -> None:
    bench = Bench(slots=3)
    tenants = ("a", "b", "c")
    for number, tenant in enumerate(tenants):
        bench.ask(number, tenant=tenant)
        bench.loaded(number, tenant=tenant)
    for number, tenant in enumerate(tenants):
        offer(bench, 11 + number, policy=f"{tenant}/p")
    bench.wait(1.0)
    assert list(bench.fetches) == [digest(11)]
    bench.fetched(11)
    assert list(bench.fetches) == [digest(12)]
    bench.fetch_failed(12)
    assert list(bench.fetches) == [digest(13)]


def test_a_prefetch_takes_no_room_from_what_leases_use() -> None:
    bench = Bench(arena_bytes=2 * 12288)
    bench.serve(1)
    bench.serve(2)
    offer(bench, 3)
    bench.wait(5.0)
    assert not bench.fetches
    assert bench.refused(bench.ask(3, size=10**9)).outcome is Outcome.STORAGE_FULL


def test_a_cordoned_node_fetches_nothing_ahead() -> None:
    bench = Bench()
    bench.serve(1)
    bench.ask(3)
    offer(bench, 2)
    bench.send(Cordoned(on=True))
    offer(bench, 4)
    bench.loaded(3)
    bench.wait(2.0)
    assert not bench.fetches
