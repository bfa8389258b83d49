"""Fetches and slots that nobody wants any more, because whoever waited has left."""

from __future__ import annotations

from sidecar.effects import CancelFetch
from wire.outcomes import Outcome

from .bench import Bench, digest


def cancelled(bench: Bench) -> list[str]:
    return [effect.digest for effect in bench.started(CancelFetch) if isinstance(effect, CancelFetch)]


def unwanted(*, slots: int = 2) -> tuple[Bench, int]:
    """A node that fetches one thing at a time, and the ask for 2, for which the fetch of 1 was cancelled."""
    bench = Bench(slots=slots, loads_in_flight=1)
    bench.ask(1)
    waiting = bench.ask(2)
    bench.release(1)
    return bench, waiting


def test_fetch_that_nobody_waits_for_makes_way_for_loads_that_wait() -> None:
    bench, waiting = unwanted()
    assert cancelled(bench) == [digest(1)]
    assert digest(2) in bench.fetches, "at once"
    bench.fetch_cancelled(1)
    bench.loaded(2)
    assert bench.granted(waiting)
    assert digest(1) not in bench.machine.state.failures
    assert bench.machine.state.cache.get(digest(1)) is None


def test_fetch_that_nobody_waits_for_goes_on_where_nobody_else_waits() -> None:
    bench = Bench(loads_in_flight=1)
    bench.release(bench.ask(1))
    assert not cancelled(bench)
    bench.fetched(1)
    bench.ask(1)
    bench.installed(1)


def test_fetch_that_is_nearly_done_goes_on() -> None:
    bench = Bench(slots=8, loads_in_flight=1)
    ask = bench.ask(1)
    bench.wait(4.0)
    bench.loaded(1)
    bench.release(ask)
    left = bench.ask(2)
    bench.ask(3)
    bench.wait(3.0)
    bench.release(left)
    assert not cancelled(bench)


def test_fetch_that_is_wanted_again_before_it_has_ended_begins_anew() -> None:
    bench, _ = unwanted()
    bench.loaded(2)
    again = bench.ask(1)
    bench.fetch_cancelled(1)
    bench.loaded(1)
    assert bench.granted(again)


def test_fetch_is_cancelled_once() -> None:
    bench, _ = unwanted(slots=8)
    again = bench.ask(1)
    bench.loaded(2)
    bench.ask(3)
    bench.release(again)
    assert cancelled(bench) == [digest(1)]
    bench.fetch_cancelled(1)


def test_load_of_what_a_cancelled_fetch_still_holds_takes_no_permit() -> None:
    bench, _ = unwanted(slots=8)
    bench.loaded(2)
    again = bench.ask(1)
    other = bench.ask(3)
    bench.loaded(3)
    assert bench.granted(other), "it does not wait for storage that hangs"
    bench.fetch_cancelled(1)
    bench.loaded(1)
    assert bench.granted(again)


def test_cancelled_fetch_that_hangs_sends_who_came_to_need_it_elsewhere() -> None:
    bench, _ = unwanted(slots=8)
    bench.loaded(2)
    again = bench.ask(1)
    bench.fetch_overdue(1)
    refused = bench.refused(again)
    assert (refused.outcome, refused.elsewhere) == (Outcome.DEADLINE, True)
    assert bench.refused(bench.ask(1)).elsewhere, "for as long as it hangs"
    bench.wait(2.0)
    bench.fetch_cancelled(1)
    later = bench.ask(1)
    bench.loaded(1)
    assert bench.granted(later)


def test_slot_cleared_for_a_load_that_nobody_waits_for_any_more_stays_free() -> None:
    bench = Bench(slots=1)
    bench.release(bench.serve(1))
    left = bench.ask(2)
    bench.fetched(2)
    bench.release(left)
    bench.removed(1)
    assert not bench.calls
    other = bench.ask(3)
    bench.loaded(3)
    assert bench.granted(other)
