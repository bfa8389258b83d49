"""The adaptive limit on models of what loads compete for: it settles where more at once would not help."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.limit import AdaptiveLimit


class Pipeline:
    """Loads as a node runs them, in virtual time: ``lanes`` fetches at once, then one install after another."""

    def __init__(self, fetch_s: float, install_s: float, lanes: int, noise: Callable[[], float] = lambda: 1.0) -> None:
        self.fetch_s = fetch_s
        self.install_s = install_s
        self.noise = noise
        self.now = 0.0
        self._lanes = [0.0] * lanes
        self._engine = 0.0
        self._running: list[tuple[float, float, int]] = []

    def run(self, limit: AdaptiveLimit, loads: int) -> float:
        """Keep as many in flight as ``limit`` allows; loads a second."""
        began = self.now
        for _ in range(loads):
            while len(self._running) < limit.value:
                self._start()
            end, start, at_once = heapq.heappop(self._running)
            self.now = end
            limit.ended("kind", end - start, max(at_once, len(self._running) + 1))
        return loads / (self.now - began)

    def _start(self) -> None:
        lane = heapq.heappop(self._lanes)
        fetched = max(lane, self.now) + self.fetch_s * self.noise()
        heapq.heappush(self._lanes, fetched)
        self._engine = max(self._engine, fetched) + self.install_s * self.noise()
        heapq.heappush(self._running, (self._engine, self.now, len(self._running) + 1))


@pytest.mark.parametrize(
    ("fetch_s", "install_s", "lanes"),
    [(0.0, 0.2, 1), (0.2, 0.2, 1), (1.0, 0.2, 8), (0.6, 0.2, 8), (1.0, 0.05, 2)],
)
@pytest.mark.parametrize("start", [1, 2, 16])
def test_limit_settles_near_the_best_throughput_without_queues(
    fetch_s: float, install_s: float, lanes: int, start: int
) -> None:
    limit = AdaptiveLimit(1, 16, start)
    pipeline = Pipeline(fetch_s, install_s, lanes)
    pipeline.run(limit, 300)
    rate = pipeline.run(limit, 300)
    best = min(1.0 / install_s, lanes / fetch_s if fetch_s else math.inf)
    assert rate >= 0.75 * best
    # Little's law: what is in flight beyond the work that can overlap only waits
    assert limit.value / rate <= 2.5 * (fetch_s + install_s)


def test_limit_bears_noise() -> None:
    random_ = random.Random(7)
    limit = AdaptiveLimit(1, 16, 2)
    pipeline = Pipeline(1.0, 0.2, 8, noise=lambda: random_.lognormvariate(0.0, 0.25))
    pipeline.run(limit, 300)
    assert pipeline.run(limit, 500) >= 0.7 / 0.2


def test_limit_falls_when_storage_becomes_slow_and_recovers() -> None:
    limit = AdaptiveLimit(1, 16, 2)
    pipeline = Pipeline(1.0, 0.2, 8)
    pipeline.run(limit, 300)
    before = limit.value
    pipeline.fetch_s, pipeline.install_s = 10.0, 2.0
    pipeline.run(limit, 20)
    assert limit.value < before
    # ten times as slow, but otherwise as before: in the end it is the same pipeline
    pipeline.run(limit, 600)
    slow = limit.value
    pipeline.fetch_s, pipeline.install_s = 1.0, 0.2
    pipeline.run(limit, 600)
    assert slow >= before - 2
    assert abs(limit.value - before) <= 2


def test_limit_does_not_grow_while_nothing_presses_against_it() -> None:
    limit = AdaptiveLimit(1, 16, 8)
    for _ in range(100):
        limit.ended("kind", 1.0, 1)
    assert limit.value == 8


def test_kinds_of_load_are_not_compared_with_each_other() -> None:
    limit = AdaptiveLimit(1, 16, 8)
    for _ in range(40):
        limit.ended("small", 0.01, 8)
        limit.ended("large", 10.0, 8)
    assert limit.value == 16


def test_time_outs_lower_it() -> None:
    limit = AdaptiveLimit(2, 16, 16)
    limit.timed_out()
    assert limit.value < 16
    for _ in range(100):
        limit.timed_out()
    assert limit.value == 2


@given(
    st.integers(1, 5),
    st.integers(0, 20),
    st.lists(
        st.tuples(st.sampled_from("ab"), st.floats(0.0, 1e6), st.integers(1, 40)) | st.none(),
        max_size=50,
    ),
)
def test_it_stays_within_its_bounds_whatever_is_measured(
    lowest: int, more: int, measured: list[tuple[str, float, int] | None]
) -> None:
    limit = AdaptiveLimit(lowest, lowest + more, 2)
    for one in measured:
        if one is None:
            limit.timed_out()
        else:
            limit.ended(*one)
        assert lowest <= limit.value <= lowest + more


def test_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match="between 3 and 2"):
        AdaptiveLimit(3, 2, 2)
