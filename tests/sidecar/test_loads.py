"""Cold loads: single flight, bounds, deadlines, failures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backends.interface import Removal
from sidecar.effects import StartFetch, StartInstall
from wire.outcomes import Outcome

from .bench import Bench, digest, name
from .world import World


def test_thousand_first_asks_are_one_fetch_and_one_install() -> None:
    bench = Bench()
    asks = [bench.ask(1, gateway=f"g{number % 3}", lease=number) for number in range(1000)]
    bench.loaded(1)
    assert len(bench.started(StartFetch)) == len(bench.started(StartInstall)) == 1
    assert all(bench.granted(ask).adapter == name(1) and bench.granted(ask).waited for ask in asks)
    assert bench.machine.state.engines["e1"].outstanding == 1000


def test_one_digest_of_two_tenants_is_fetched_once_and_installed_for_each() -> None:
    bench = Bench()
    mine, theirs = bench.ask(1), bench.ask(1, tenant="other")
    bench.loaded(1)
    bench.installed(1, tenant="other")
    assert len(bench.started(StartFetch)) == 1
    assert (bench.granted(mine).adapter, bench.granted(theirs).adapter) == (name(1), name(1, "other"))


def test_serving_adapter_is_granted_at_once() -> None:
    bench = Bench()
    bench.serve(1)
    ask = bench.ask(1)
    assert (bench.granted(ask).port, bench.granted(ask).waited) == (8001, False)


def test_base_and_serving_adapters_never_wait_behind_loads() -> None:
    bench = Bench(loads_in_flight=1, loads_queued=1)
    bench.serve(1)
    for number in (2, 3, 4):
        bench.ask(number)
    assert bench.granted(bench.ask(None)).adapter == "base-a"
    assert bench.granted(bench.ask(1)).adapter == name(1)


def test_four_cold_policies_with_one_load_in_flight_and_one_queued() -> None:
    bench = Bench(slots=4, loads_in_flight=1, loads_queued=1)
    asks = [bench.ask(number) for number in (1, 2, 3, 4)]
    for ask in asks[2:]:
        refused = bench.refused(ask)
        assert (refused.outcome, refused.elsewhere) == (Outcome.COLD_LOAD_BOUND, True)
        assert refused.retry_after_s is not None
        assert refused.retry_after_s > 0
    bench.loaded(1)
    bench.loaded(2)
    assert [bench.granted(ask).adapter for ask in asks[:2]] == [name(1), name(2)]


def test_retry_after_follows_what_loads_take() -> None:
    def measured(seconds: float) -> float:
        bench = Bench(slots=8, loads_in_flight=1, loads_queued=1)
        for number in range(4):
            bench.ask(number)
            bench.wait(seconds)
            bench.loaded(number)
        bench.ask(10)
        bench.ask(11)
        return bench.refused(bench.ask(12)).retry_after_s or 0.0

    assert measured(8.0) > 4 * measured(0.5)


def test_waiters_of_one_load_are_bounded() -> None:
    bench = Bench(waiters_per_load=2)
    bench.ask(1)
    bench.ask(1)
    refused = bench.refused(bench.ask(1))
    assert (refused.outcome, refused.elsewhere) == (Outcome.COLD_LOAD_BOUND, True)


def test_no_more_than_the_limit_is_in_flight() -> None:
    bench = Bench(slots=8, loads_in_flight=2)
    for number in range(6):
        bench.ask(number)
    assert len(bench.fetches) == 2
    bench.fetched(0)
    assert len(bench.fetches) == 1, "an install counts as in flight"
    bench.installed(0)
    assert len(bench.fetches) == 2


def test_installs_of_an_engine_go_one_at_a_time() -> None:
    bench = Bench(slots=8, loads_in_flight=4)
    for number in (1, 2, 3):
        bench.ask(number)
    for number in (1, 2, 3):
        bench.fetched(number)
    assert len(bench.started(StartInstall)) == 1
    for number in (1, 2, 3):
        bench.installed(number)
    assert bench.serving() == {name(1), name(2), name(3)}


def test_deadline_passes_for_one_waiter_while_another_waits_on() -> None:
    bench = Bench()
    short, long = bench.ask(1, wait_s=1.0), bench.ask(1, wait_s=60.0)
    bench.wait(2.0)
    assert bench.refused(short).outcome is Outcome.DEADLINE
    bench.loaded(1)
    assert bench.granted(long)


def test_ask_whose_deadline_has_passed_starts_nothing() -> None:
    bench = Bench()
    assert bench.refused(bench.ask(1, wait_s=0.0)).outcome is Outcome.DEADLINE
    assert not bench.fetches


def test_queued_load_is_cancelled_when_its_last_waiter_leaves() -> None:
    bench = Bench(loads_in_flight=1)
    bench.ask(1)
    expired, left = bench.ask(2, wait_s=1.0), bench.ask(3)
    bench.release(left)
    bench.wait(2.0)
    assert bench.refused(left).outcome is Outcome.CLIENT_GONE
    assert bench.refused(expired).outcome is Outcome.DEADLINE
    bench.loaded(1)
    assert not bench.fetches
    assert bench.machine.state.queue.queued == 0


def test_load_that_nobody_waits_for_any_more_takes_no_slot() -> None:
    bench = Bench()
    bench.release(bench.ask(1))
    bench.fetched(1)
    assert not bench.calls
    bench.ask(1)
    assert not bench.fetches, "the bytes had come"
    bench.installed(1)


def test_failed_fetch_is_known_bad_for_longer_each_time() -> None:
    bench = Bench(negative_first_s=1.0, negative_max_s=4.0)
    pauses = []
    for _ in range(4):
        ask = bench.ask(1)
        bench.fetch_failed(1)
        assert bench.refused(ask).outcome is Outcome.ARTIFACT_UNAVAILABLE
        again = bench.refused(bench.ask(1))
        assert again.outcome is Outcome.KNOWN_BAD
        assert "no such file" in again.message
        pauses.append(again.retry_after_s)
        bench.wait(again.retry_after_s or 0.0)
    assert pauses == pytest.approx([1.0, 2.0, 4.0, 4.0])


def test_fetches_that_hang_hold_no_permit_and_keep_their_extent_until_they_end() -> None:
    bench = Bench(slots=4, loads_in_flight=2, negative_first_s=1.0)
    hanging = [bench.ask(1), bench.ask(2)]
    waiting = bench.ask(3)
    assert digest(3) not in bench.fetches
    used = bench.machine.state.cache.used
    for number in (1, 2):
        bench.fetch_overdue(number)
    for ask in hanging:
        refused = bench.refused(ask)
        assert (refused.outcome, refused.elsewhere) == (Outcome.DEADLINE, True)
    bench.loaded(3)
    assert bench.granted(waiting)
    assert bench.machine.state.cache.used > used, "a thread may still write there"
    assert bench.refused(bench.ask(1)).outcome is Outcome.KNOWN_BAD
    bench.wait(30.0)
    still = bench.refused(bench.ask(1))
    assert (still.outcome, still.elsewhere) == (Outcome.KNOWN_BAD, True)
    bench.fetch_failed(1)
    again = bench.ask(1)
    bench.loaded(1)
    assert bench.granted(again)


def test_bytes_that_come_late_after_all_are_used() -> None:
    bench = Bench(negative_first_s=1.0)
    bench.ask(1)
    bench.fetch_overdue(1)
    bench.fetched(1)
    bench.wait(2.0)
    again = bench.ask(1)
    bench.installed(1)
    assert bench.granted(again)


def test_success_forgives_failures() -> None:
    bench = Bench()
    for _ in range(3):
        bench.ask(1)
        bench.fetch_failed(1)
        bench.wait(10.0)
    bench.serve(1)
    bench.ask(2)
    assert digest(1) not in bench.machine.state.failures


def test_broken_install_frees_the_slot_and_is_remembered() -> None:
    bench = Bench(slots=1)
    ask = bench.ask(1)
    bench.fetched(1)
    bench.broke(1)
    refused = bench.refused(ask)
    assert (refused.outcome, refused.elsewhere) == (Outcome.ENGINE_FAILED, True)
    assert bench.refused(bench.ask(1)).outcome is Outcome.KNOWN_BAD
    bench.serve(2)


@pytest.mark.parametrize("end", [Bench.broke, Bench.unsure])
def test_an_install_that_fails_on_one_engine_is_tried_on_the_nodes_other(end: Callable[[Bench, int], None]) -> None:
    bench = Bench(engines=2)
    ask = bench.ask(1)
    bench.fetched(1)
    end(bench, 1)
    bench.installed(1, "e2")
    assert {bench.granted(asked).engine for asked in (ask, bench.ask(1))} == {"e2"}


def test_rejected_install_is_unfit_for_a_while_and_longer_each_time() -> None:
    bench = Bench(negative_max_s=60.0)
    for pause in (30.0, 60.0, 60.0):
        ask = bench.ask(1)
        if digest(1) in bench.fetches:
            bench.fetched(1)
        bench.rejected(1)
        # a node of other engines may take it
        refused = bench.refused(ask)
        assert (refused.outcome, refused.elsewhere) == (Outcome.UNFIT, True)
        bench.wait(pause - 1.0)
        again = bench.refused(bench.ask(1))
        assert (again.outcome, again.message, again.elsewhere) == (Outcome.UNFIT, "wrong shape", True)
        bench.wait(2.0)
    assert bench.serving() == set()


def test_what_an_engine_wrongly_called_unfit_serves_in_the_end() -> None:
    bench = Bench()
    ask = bench.ask(1)
    bench.fetched(1)
    bench.rejected(1)
    assert bench.refused(ask).outcome is Outcome.UNFIT
    bench.wait(31.0)
    ask = bench.ask(1)
    bench.installed(1)
    assert bench.granted(ask)
    assert bench.serving() == {name(1)}


def test_rejected_by_one_engine_goes_to_another_of_other_limits() -> None:
    bench = Bench(engines=2, up=False)
    bench.up("e1", slots=2)
    bench.up("e2", slots=1)
    ask = bench.ask(1)
    bench.fetched(1)
    bench.rejected(1, "e1")
    bench.installed(1, "e2")
    assert bench.granted(ask).engine == "e2"


def test_rank_above_every_engine_is_unfit_at_once() -> None:
    bench = Bench()
    refused = bench.refused(bench.ask(1, rank=17))
    assert refused.outcome is Outcome.UNFIT
    assert "rank 17" in refused.message
    assert "16" in refused.message
    assert not bench.fetches


def test_rank_chooses_the_engine_that_can() -> None:
    bench = Bench(engines=2, up=False)
    bench.up("e1", max_rank=8)
    bench.up("e2", max_rank=64)
    ask = bench.ask(1, rank=32)
    bench.loaded(1, "e2")
    assert bench.granted(ask).engine == "e2"


def test_base_that_is_not_here_may_be_elsewhere() -> None:
    bench = Bench()
    refused = bench.refused(bench.ask(1, base="other"))
    assert (refused.outcome, refused.elsewhere) == (Outcome.BASE_NOT_DEPLOYED, True)


def test_engine_that_is_not_ready_may_be_elsewhere() -> None:
    bench = Bench(up=False)
    for number in (1, None):
        refused = bench.refused(bench.ask(number))
        assert (refused.outcome, refused.elsewhere) == (Outcome.NO_HEALTHY_NODE, True)


@pytest.mark.parametrize("tenant", ["", "UPPER", "a/b", "a@b"])
def test_malformed_tenant_is_refused(tenant: str) -> None:
    bench = Bench()
    assert bench.refused(bench.ask(1, tenant=tenant)).outcome is Outcome.INVALID_REQUEST
    assert not bench.fetches


def test_unsure_install_keeps_its_bytes_until_the_engine_tells() -> None:
    bench = Bench(slots=2, arena_bytes=16_384)
    ask = bench.ask(1)
    bench.fetched(1)
    bench.unsure(1)
    refused = bench.refused(ask)
    assert (refused.outcome, refused.elsewhere) == (Outcome.ENGINE_FAILED, True)
    other = bench.ask(2)
    assert digest(2) not in bench.fetches, "no room beside pinned bytes, and no new install for a silent engine"
    waiting = bench.ask(1)
    bench.wait(3.0)
    bench.read({name(1)})
    assert bench.granted(waiting).adapter == name(1)
    assert other not in bench.answers


def test_unsure_install_that_is_absent_is_sent_again() -> None:
    bench = Bench()
    bench.ask(1)
    bench.fetched(1)
    bench.unsure(1)
    bench.wait(3.0)
    bench.read(set())
    bench.installed(1)
    assert bench.granted(bench.ask(1)).adapter == name(1)


def test_engine_that_left_a_call_open_gets_no_new_installs() -> None:
    bench = Bench()
    bench.ask(1)
    bench.fetched(1)
    bench.unsure(1)
    ask = bench.ask(2)
    assert not bench.fetches
    bench.wait(3.0)
    bench.read({name(1)})
    bench.loaded(2)
    assert bench.granted(ask)


def test_load_goes_elsewhere_when_nobody_knows_whether_its_slot_is_free() -> None:
    bench = Bench(engines=2, up=False)
    bench.up("e1", slots=1)
    bench.release(bench.serve(1))
    ask = bench.ask(2)
    bench.fetched(2)
    bench.up("e2", slots=1)
    bench.remove_unsure(1)
    bench.installed(2, "e2")
    assert bench.granted(ask).engine == "e2"


def test_unsure_removal_is_asked_again_and_sends_nobody_there() -> None:
    bench = Bench(slots=1)
    bench.release(bench.serve(1))
    waiting = bench.ask(2)
    bench.fetched(2)
    bench.remove_unsure(1)
    again = bench.ask(1)
    assert again not in bench.answers
    bench.wait(3.0)
    bench.removed(1, removal=Removal.ABSENT)
    bench.installed(2)
    assert bench.granted(waiting).adapter == name(2)


# the limit on loads in flight


def test_limit_follows_what_loads_take() -> None:
    def settled(fetch_s: float, install_s: float) -> int:
        world = World(
            slots=64, fetch_s=fetch_s, install_s=install_s, use_s=0.1, lanes=8,
            loads_in_flight_min=1, loads_in_flight=16,
        )  # fmt: skip
        for _ in range(40):
            world.client("acme", lambda: world.random.randrange(100_000), until=120.0)
        world.run(120.0)
        world.check()
        return world.machine.state.queue.limit

    # an engine installs one at a time: more at once help as far as fetches overlap with that
    assert settled(0.001, 0.2) <= 3
    assert settled(1.0, 0.2) >= 4


def test_no_load_waits_for_ever_while_the_limit_moves() -> None:
    world = World(slots=16, use_s=0.2, noise=0.5, loads_in_flight_min=1, loads_in_flight=16)
    for _ in range(40):
        world.client("acme", lambda: world.random.randrange(1000), until=60.0)
    world.run(120.0)
    assert all(request.granted > 0.0 for request in world.requests)
    world.check()
