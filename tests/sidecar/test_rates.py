"""How fast a queue drains, also where its loads leave many at a time."""

from __future__ import annotations

import pytest

from sidecar.rates import DrainRate

AT_ONCE = 16


def drained(rate: DrainRate, *, bursts: int, every_s: float, now: float = 0.0) -> float:
    """AT_ONCE loads leave every ``every_s``, a millisecond apart; when the last one did."""
    rate.joined(now)
    for _ in range(bursts):
        now += every_s
        for place in range(AT_ONCE):
            rate.left(now + 0.001 * place, waiting=AT_ONCE, at_once=AT_ONCE)
    return now + 0.001 * (AT_ONCE - 1)


@pytest.mark.parametrize("every_s", [0.5, 4.0])
@pytest.mark.parametrize("later", [0.001, 0.5, 0.9])
def test_loads_that_leave_many_at_a_time_do_so_again(every_s: float, later: float) -> None:
    rate = DrainRate()
    ended = drained(rate, bursts=6, every_s=every_s)
    now = ended + later * every_s
    for bursts in (2, 4):
        true_s = bursts * every_s - (now - ended)
        assert 0.5 <= rate.until(bursts * AT_ONCE, now, expected_s=0.1) / true_s <= 2.0


def test_a_drain_that_became_slower_is_told_before_as_many_again_have_left() -> None:
    rate = DrainRate()
    now = drained(rate, bursts=6, every_s=0.2)
    now = drained(rate, bursts=3, every_s=4.0, now=now)
    assert rate.until(2 * AT_ONCE, now, expected_s=0.1) >= 4.0


def test_those_given_up_are_no_departures_but_time_without_any() -> None:
    rate = DrainRate()
    now = drained(rate, bursts=1, every_s=1.0)
    before = rate.interval_s(1.0)
    for _ in range(20):
        now += 1.0
        rate.joined(now)
        rate.given_up(now + 0.5, waiting=0)
    assert rate.interval_s(1.0) > before
    assert rate.pending_interval_s(now + 100.0, 1.0) == rate.interval_s(1.0), "nothing waits"


def test_where_loads_leave_one_by_one_ten_of_them_matter() -> None:
    rate = DrainRate()
    rate.joined(0.0)
    for place in range(1, 31):
        rate.left(float(place), waiting=1)
    for place in range(1, 21):
        rate.left(30.0 + 0.1 * place, waiting=1)
    assert rate.interval_s(0.1) < 0.25
