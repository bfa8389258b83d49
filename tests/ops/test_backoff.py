from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ops.supervise.backoff import Backoff


def test_the_first_restart_is_nearly_at_once_and_later_ones_wait_longer() -> None:
    backoff = Backoff(first_s=0.1, max_s=1.0, forget_after_s=30.0)
    assert [backoff.after_exit(1.0) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_a_long_life_forgets_earlier_failures() -> None:
    backoff = Backoff(first_s=0.1, max_s=1.0, forget_after_s=30.0)
    for _ in range(5):
        backoff.after_exit(1.0)
    assert backoff.after_exit(31.0) == 0.1


@given(st.lists(st.floats(min_value=0.0, max_value=100.0), min_size=1))
def test_a_delay_is_always_within_its_bounds(lives: list[float]) -> None:
    backoff = Backoff(first_s=0.1, max_s=4.0)
    assert all(0.1 <= backoff.after_exit(lived) <= 4.0 for lived in lives)
