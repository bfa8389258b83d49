from __future__ import annotations

import random
from collections import Counter

import pytest

from loadtest.traffic import (
    SCENARIOS,
    beside_a_base,
    drifting_zipf,
    merged,
    poisson,
    policy_names,
    rounds_in_random_order,
    unique_burst,
    weak_locality,
)

NAMES = policy_names(200)


@pytest.mark.parametrize("name", SCENARIOS)
def test_arrivals_are_in_order_of_known_policies_and_follow_from_the_seed(name: str) -> None:
    first, second, other = (SCENARIOS[name](NAMES, 50.0, 20.0, random.Random(seed)) for seed in (1, 1, 2))
    assert first == second
    assert first == sorted(first, key=lambda one: one.at)
    assert {one.model for one in first} <= set(NAMES)
    assert len(first) > 0
    if name != "unique-burst":
        assert first != other
        assert first[-1].at < 20.0


def test_a_rate_is_kept() -> None:
    assert len(list(poisson(100.0, 100.0, random.Random(1)))) == pytest.approx(10_000, rel=0.05)


def test_a_burst_asks_for_each_once_at_once() -> None:
    burst = unique_burst(NAMES)
    assert {one.at for one in burst} == {0.0}
    assert sorted(one.model for one in burst) == NAMES


def test_rounds_ask_for_each_as_often() -> None:
    arrivals = rounds_in_random_order(NAMES, 5, 60.0, random.Random(1))
    assert set(Counter(one.model for one in arrivals).values()) == {5}
    assert arrivals[-1].at < 60.0


def test_popularity_falls_by_rank_and_drifts() -> None:
    arrivals = drifting_zipf(NAMES, 200.0, 100.0, random.Random(1), swaps_per_s=5.0)
    half = len(arrivals) // 2
    tops = []
    for part in (arrivals[:half], arrivals[half:]):
        counts = Counter(one.model for one in part)
        (top, most), *_, (_, least) = counts.most_common()
        tops.append(top)
        assert most > 10 * least
    still = drifting_zipf(NAMES, 200.0, 100.0, random.Random(1), swaps_per_s=1e-9)
    (first, most), (_, second), *_ = Counter(one.model for one in still).most_common()
    assert most > 1.5 * second
    assert first in NAMES


def test_weak_locality_comes_back_more_often_than_chance() -> None:
    def again(arrivals: list[str]) -> int:
        return sum(model in arrivals[max(0, place - 20) : place] for place, model in enumerate(arrivals))

    near = [one.model for one in weak_locality(NAMES, 50.0, 40.0, random.Random(1), again=0.5, depth=20)]
    far = [one.model for one in weak_locality(NAMES, 50.0, 40.0, random.Random(1), again=0.0)]
    assert again(near) > 3 * again(far)


def test_base_traffic_runs_beside() -> None:
    arrivals = beside_a_base(unique_burst(NAMES), "base", 20.0, random.Random(1))
    assert Counter(one.model == "base" for one in arrivals)[True] > 5
    assert arrivals == merged(arrivals)
