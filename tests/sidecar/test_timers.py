"""Timers against the plain truth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.timers import Timers

KEYS = st.integers(0, 5)
MOVES = st.one_of(
    st.tuples(st.just("set"), KEYS, st.integers(0, 50)),
    st.tuples(st.just("cancel"), KEYS, st.just(0)),
    st.tuples(st.just("due"), st.just(0), st.integers(0, 50)),
)


@given(st.lists(MOVES, max_size=300))
def test_each_deadline_is_told_once_unless_moved_or_cancelled(moves: list[tuple[str, int, int]]) -> None:
    timers: Timers[int] = Timers()
    truth: dict[int, int] = {}
    for move, key, at in moves:
        if move == "set":
            timers.set(key, at)
            truth[key] = at
        elif move == "cancel":
            timers.cancel(key)
            truth.pop(key, None)
        else:
            due = timers.due(at)
            assert set(due) == {key for key, when in truth.items() if when <= at}
            times = [truth.pop(key) for key in due]
            assert times == sorted(times), "the oldest first"
        assert len(timers) == len(truth)
