"""Slots: who is evicted, what a busy engine means, and that neither residents nor newcomers starve."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.interface import Removal
from sidecar.effects import StartRemove
from sidecar.events import RevisionOffered

from .bench import SIZE, TENANT, Bench, digest, name


def test_free_slot_before_eviction_and_least_recently_used_first() -> None:
    bench = Bench(slots=2)
    bench.release(bench.serve(1))
    bench.wait(3.0)
    bench.release(bench.serve(2))
    bench.wait(3.0)
    bench.release(bench.ask(1))
    assert not bench.started(StartRemove)
    ask = bench.ask(3)
    bench.fetched(3)
    bench.removed(2)
    bench.installed(3)
    assert bench.granted(ask)
    assert bench.serving() == {name(1), name(3)}


def test_leased_adapter_is_never_evicted_and_the_load_waits_for_a_release() -> None:
    bench = Bench(slots=1)
    lease = bench.serve(1)
    ask = bench.ask(2)
    bench.wait(1.0)
    assert not bench.calls
    assert ask not in bench.answers
    bench.release(lease)
    bench.fetched(2)
    bench.removed(1)
    bench.installed(2)
    assert bench.granted(ask).waited


def test_slot_that_was_idle_but_is_leased_again_before_the_bytes_came() -> None:
    bench = Bench(slots=1)
    bench.release(bench.serve(1))
    ask = bench.ask(2)
    again = bench.ask(1)
    bench.fetched(2)
    assert not bench.calls
    assert bench.granted(again)
    bench.release(again)
    bench.removed(1)
    bench.installed(2)
    assert bench.granted(ask)


def test_load_waiting_for_a_slot_does_not_block_other_engines() -> None:
    bench = Bench(engines=2, up=False, loads_in_flight=1)
    bench.up("e1", slots=1)
    bench.serve(1)
    bench.ask(2)
    bench.up("e2", slots=1)
    bench.loaded(2, "e2")
    assert bench.serving("e2") == {name(2)}


def test_lease_goes_to_the_engine_with_least_outstanding() -> None:
    bench = Bench(engines=2, up=False)
    bench.up("e1", installed=(name(1),))
    bench.up("e2", installed=(name(1),))
    assert {bench.granted(bench.ask(1)).engine for _ in range(2)} == {"e1", "e2"}
    assert {bench.granted(bench.ask(None)).engine for _ in range(2)} == {"e1", "e2"}


def test_busy_engine_keeps_the_adapter_and_another_is_evicted() -> None:
    bench = Bench(slots=2)
    bench.release(bench.serve(1))
    bench.wait(1.0)
    bench.release(bench.serve(2))
    ask = bench.ask(3)
    bench.fetched(3)
    bench.removed(1, removal=Removal.BUSY)
    assert bench.granted(bench.ask(1)).adapter == name(1)
    bench.removed(2)
    bench.installed(3)
    assert bench.granted(ask)


def test_busy_engine_is_asked_again_later() -> None:
    bench = Bench(slots=1)
    bench.release(bench.serve(1))
    ask = bench.ask(2)
    bench.fetched(2)
    bench.removed(1, removal=Removal.BUSY)
    assert not bench.calls, "not at once"
    bench.wait(5.0)
    bench.removed(1)
    bench.installed(2)
    assert bench.granted(ask)


def test_newcomer_gets_a_slot_though_residents_never_pause() -> None:
    bench = Bench(slots=2, slot_age_bound_s=5.0)
    held = {1: bench.serve(1), 2: bench.serve(2)}
    newcomer = bench.ask(3, wait_s=600.0)
    for _ in range(40):
        for number, lease in list(held.items()):
            # the next lease of a resident begins before its last one ends
            following = bench.ask(number)
            bench.release(lease)
            if following in bench.answers:
                held[number] = following
            else:
                del held[number]
        bench.wait(0.5)
        if bench.fetches:
            bench.fetched(3)
        if bench.calls:
            break
    removal = bench.calls["e1"]
    assert isinstance(removal, StartRemove)
    bench.removed(1 if removal.adapter == name(1) else 2)
    bench.installed(3)
    assert bench.granted(newcomer)
    assert len(held) == 1, "one resident made room, the other went on"


@given(
    streams=st.lists(st.tuples(st.integers(1, 3), st.floats(0.0, 20.0)), min_size=1, max_size=3),
    history=st.booleans(),
)
def test_newcomer_gets_a_slot_in_time_though_most_residents_have_requests_without_end(
    streams: list[tuple[int, float]], history: bool
) -> None:
    """However many leases each has, and whatever is known of them: one resident's are short, and it is found."""
    bench = Bench(slots=1 + len(streams), slot_age_bound_s=5.0, gateway_silence_s=1e6)
    if history:
        bench.release(bench.serve(1))
    for number, (leases, age) in enumerate(streams, start=1):
        for _ in range(leases):
            lease = bench.ask(number)
            if digest(number) in bench.fetches:
                bench.fetched(number)
            if bench.calls:
                bench.installed(number)
            assert bench.granted(lease)
        bench.wait(age)
    short = [bench.serve(99), bench.ask(99)]
    newcomer = bench.ask(100, wait_s=600.0)
    begun = bench.now
    while newcomer not in bench.answers:
        following = bench.ask(99, wait_s=600.0)
        for lease in short:
            bench.release(lease)
        short = [following]
        bench.wait(1.0)
        if bench.fetches:
            bench.fetched(100)
        call = bench.calls.get("e1")
        if isinstance(call, StartRemove):
            assert call.adapter == name(99)
            bench.removed(99)
            bench.installed(100)
        # the age bound, and once more for each that did not make room
        assert bench.now - begun <= 5.0 * (2 + len(streams)) + 3.0


def test_resident_with_one_long_request_is_passed_over_for_one_with_two_short_ones() -> None:
    bench = Bench(slots=2, slot_age_bound_s=5.0)
    bench.serve(1)
    short = [bench.serve(2), bench.ask(2)]
    bench.ask(3, wait_s=600.0)
    for _ in range(5):
        short.append(bench.ask(2))
        bench.release(short.pop(0))
        bench.wait(1.0)
    bench.wait(1.0)
    assert bench.serving() == {name(1)}, "the other one is drained"


def test_slot_that_is_drained_in_vain_serves_again_and_another_is_drained() -> None:
    bench = Bench(slots=2, slot_age_bound_s=5.0, gateway_silence_s=1e6)
    first, usual = bench.serve(1), bench.ask(1)
    bench.wait(8.0)
    bench.release(first)
    # its requests were short so far, and this one, which never ends, begins just now
    bench.release(bench.serve(2))
    endless = bench.ask(2)
    newcomer = bench.ask(3, wait_s=600.0)
    bench.wait(5.5)
    assert bench.serving() == {name(1)}, "what was short should be over soon"
    blocked = bench.ask(2, wait_s=600.0)
    assert blocked not in bench.answers
    bench.wait(5.5)
    assert bench.granted(blocked).adapter == name(2)
    assert bench.serving() == {name(2)}
    bench.release(usual)
    bench.fetched(3)
    bench.removed(1)
    bench.installed(3)
    assert bench.granted(newcomer)
    assert bench.granted(endless).adapter == name(2)


def test_drained_slot_serves_again_when_nobody_needs_it() -> None:
    bench = Bench(slots=1, slot_age_bound_s=5.0)
    bench.serve(1)
    newcomer = bench.ask(2, wait_s=8.0)
    bench.wait(6.0)
    waiting = bench.ask(1)
    assert waiting not in bench.answers, "no new leases while it drains"
    bench.wait(3.0)
    assert bench.refused(newcomer)
    assert bench.granted(waiting).adapter == name(1)


def test_arena_full_of_leased_bytes_makes_a_load_wait_then_gives_them_up() -> None:
    bench = Bench(slots=3, arena_bytes=2 * 12_288, slot_age_bound_s=5.0)
    bench.serve(1)
    bench.serve(2)
    ask = bench.ask(3)
    bench.wait(1.0)
    assert not bench.fetches
    bench.wait(5.0)
    bench.loaded(3)
    assert bench.granted(ask)
    assert bench.serving() == {name(1), name(2), name(3)}, "an engine needs no copy of ours"


def test_idle_bytes_are_evicted_before_leased_ones() -> None:
    bench = Bench(slots=3, arena_bytes=2 * 12_288)
    bench.serve(1)
    bench.release(bench.serve(2))
    bench.ask(3)
    assert bench.fetches
    assert bench.machine.state.cache.resident(name(1).partition("@")[2])
    assert not bench.machine.state.cache.resident(name(2).partition("@")[2])


def test_revision_larger_than_the_arena_may_fit_elsewhere() -> None:
    bench = Bench(arena_bytes=65_536)
    refused = bench.refused(bench.ask(1, size=65_536))
    assert (refused.outcome, refused.elsewhere) == ("storage_full", True)


def test_adapters_that_are_not_ours_take_slots_and_are_left_alone() -> None:
    bench = Bench(up=False)
    bench.up(slots=2, installed=("somebody's",))
    bench.release(bench.serve(1))
    bench.ask(2)
    bench.fetched(2)
    bench.removed(1)
    bench.installed(2)
    assert bench.serving() == {name(2)}


def test_forgotten_adapter_frees_its_slot() -> None:
    bench = Bench(up=False)
    bench.up(slots=1, removes_for_real=False)
    bench.release(bench.serve(1))
    bench.ask(2)
    bench.fetched(2)
    bench.removed(1, removal=Removal.FORGOTTEN)
    bench.installed(2)
    assert bench.serving() == {name(2)}


# hysteresis


def test_adapter_that_just_came_stays_while_another_can_go() -> None:
    bench = Bench(slots=2, min_residency_s=5.0)
    bench.release(bench.serve(1))
    bench.wait(10.0)
    bench.release(bench.serve(2))
    bench.wait(1.0)
    bench.release(bench.ask(1))
    bench.ask(3)
    bench.fetched(3)
    bench.removed(1)
    bench.installed(3)
    assert bench.serving() == {name(2), name(3)}


def test_adapter_that_just_came_goes_where_there_is_no_other() -> None:
    bench = Bench(slots=1, min_residency_s=5.0)
    bench.release(bench.serve(1))
    ask = bench.ask(2)
    bench.fetched(2)
    bench.removed(1)
    bench.installed(2)
    assert bench.granted(ask)


def test_adapter_whose_bytes_are_at_hand_goes_before_one_that_would_have_to_be_fetched() -> None:
    bench = Bench(slots=2, arena_bytes=2 * 12_288, min_residency_s=1.0)
    ask = bench.ask(1)
    bench.wait(5.0)
    bench.loaded(1)
    bench.release(ask)
    ask = bench.ask(2)
    bench.wait(5.0)
    bench.loaded(2)
    bench.release(ask)
    bench.wait(10.0)
    bench.release(bench.ask(2))
    # another revision's bytes take the room of the first one's: they are in its slot only
    cache = bench.machine.state.cache
    bench.send(RevisionOffered(policy=f"{TENANT}/p", digest=digest(9), size=SIZE))
    bench.wait(1.0)
    bench.fetched(9)
    gone, kept = (1, 2) if cache.resident(digest(2)) else (2, 1)
    assert not cache.resident(digest(gone))
    bench.release(bench.ask(kept))
    bench.wait(5.0)
    bench.release(bench.ask(gone))
    bench.wait(5.0)
    bench.release(bench.ask(kept))
    bench.wait(2.0)
    bench.ask(9)
    bench.removed(kept)
    bench.installed(9)
    assert bench.serving() == {name(gone), name(9)}


def test_resident_that_just_came_has_its_time_before_it_is_drained_for_another() -> None:
    bench = Bench(slots=1, slot_age_bound_s=2.0, min_residency_s=10.0)
    bench.serve(1)
    bench.ask(2, wait_s=600.0)
    bench.wait(5.0)
    assert bench.serving() == {name(1)}, "overdue, but it came just now"
    bench.wait(6.0)
    assert bench.serving() == set(), "now it takes no new leases"


def test_drained_slot_is_for_the_load_that_waited_not_for_one_that_comes_then() -> None:
    bench = Bench(slots=2, loads_in_flight=1, slot_age_bound_s=5.0)
    leases = [bench.ask(1), bench.ask(2)]
    waited = bench.ask(3, wait_s=600.0)
    for number in (1, 2):
        bench.loaded(number)
    bench.wait(6.0)
    (resident,) = {1, 2} - {number for number in (1, 2) if name(number) in bench.serving()}
    # its turn is first, as that of any tenant that had nothing waiting
    other = bench.ask(4, tenant="other", wait_s=600.0)
    bench.release(leases[resident - 1])
    bench.fetched(3)
    bench.removed(resident)
    bench.installed(3)
    assert bench.granted(waited)
    assert other not in bench.answers


# shares of tenants


def fill(bench: Bench, numbers: range, tenant: str) -> None:
    for number in numbers:
        ask = bench.ask(number, tenant=tenant)
        bench.loaded(number, tenant=tenant)
        bench.release(ask)
        bench.wait(0.5)


def test_tenant_above_its_share_of_the_slots_replaces_its_own() -> None:
    bench = Bench(slots=4, min_residency_s=0.0)
    fill(bench, range(1), "light")
    fill(bench, range(10, 13), "flood")
    bench.ask(20, tenant="flood")
    bench.fetched(20)
    assert bench.removing() == name(10, "flood"), "not the light tenant's, though it was used less lately"


def test_slots_that_a_tenant_left_long_ago_are_nobodys() -> None:
    bench = Bench(slots=4, min_residency_s=0.0, slot_share_s=30.0)
    fill(bench, range(1), "light")
    bench.wait(60.0)
    fill(bench, range(10, 13), "flood")
    bench.ask(20, tenant="flood")
    bench.fetched(20)
    assert bench.removing() == name(0, "light")


def test_tenant_takes_no_slot_from_one_that_has_fewer_though_both_have_more_than_their_share() -> None:
    bench = Bench(slots=8, min_residency_s=0.0)
    fill(bench, range(1), "lighter")
    fill(bench, range(10, 13), "light")
    fill(bench, range(20, 24), "flood")
    bench.ask(30, tenant="flood")
    bench.fetched(30)
    assert bench.removing() == name(20, "flood")


def test_tenant_with_many_slots_waits_for_its_own_rather_than_take_another_tenants() -> None:
    bench = Bench(slots=6, min_residency_s=0.0, slot_age_bound_s=3.0)
    fill(bench, range(1), "light")
    held = []
    for number in range(10, 15):
        held.append(bench.ask(number, tenant="flood"))
        bench.loaded(number, tenant="flood")
    waiting = bench.ask(20, tenant="flood", wait_s=600.0)
    assert not bench.fetches, "the light tenant's slot is idle, but used lately"
    bench.wait(2.0)
    assert name(0, "light") in bench.serving()
    bench.release(held[0])
    bench.fetched(20)
    assert bench.removing() == name(10, "flood")
    assert waiting not in bench.answers


def test_slots_that_nobody_uses_are_for_whoever_needs_them() -> None:
    bench = Bench(slots=6, min_residency_s=0.0, slot_share_s=30.0)
    fill(bench, range(1), "light")
    for number in range(10, 15):
        bench.ask(number, tenant="flood")
        bench.loaded(number, tenant="flood")
    bench.ask(20, tenant="flood", wait_s=600.0)
    bench.alive()
    bench.wait(10.0)
    bench.alive()
    bench.wait(10.0)
    assert not bench.fetches
    bench.alive()
    bench.wait(12.0)
    bench.fetched(20)
    assert bench.removing() == name(0, "light")
