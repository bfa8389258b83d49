"""Operations run in the order of their numbers, whatever the order in which they come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.training.ordering import Line


@given(st.permutations(range(1, 12)))
def test_any_order_of_arrival_runs_in_order(arrivals: list[int]) -> None:
    line = Line(1)
    ran: list[str] = []
    for seq in arrivals:
        line.add(seq, str(seq))
        while (request_id := line.first()) is not None:
            ran.append(request_id)
            line.passed()
    assert ran == [str(seq) for seq in range(1, 12)]
    assert not line.gapped


def test_what_is_past_does_not_come_again() -> None:
    line = Line(5)
    line.add(4, "old")
    assert line.first() is None
    assert not line.gapped


def test_what_waits_behind_a_gap_is_given_up_and_the_line_goes_on_behind_it() -> None:
    line = Line(1)
    line.add(4, "four")
    line.add(2, "two")
    assert line.gapped
    line.go_past(4)
    assert not line.gapped
    line.add(3, "late")
    assert line.first() is None
    line.add(5, "five")
    assert line.first() == "five"
