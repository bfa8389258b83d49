"""Promises: kept for as many as come back, forgotten in time, bounded in number; rates that estimates are made of."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sidecar.promises import Promises
from sidecar.rates import DrainRate, LoadTimes

TENANTS = st.sampled_from(("a", "b"))
KEYS = st.integers(0, 6)


class Kept(RuleBasedStateMachine):
    """Against a dictionary of who was told to come back when."""

    def __init__(self) -> None:
        super().__init__()
        self.promises = Promises()
        self.now = 0.0
        self.due: dict[tuple[str, int], float] = {}
        self.made: dict[tuple[str, int], float] = {}

    @rule(tenant=TENANTS, key=KEYS, after_s=st.floats(0.1, 20.0))
    def make(self, tenant: str, key: int, after_s: float) -> None:
        self.promises.make(tenant, key, 1, self.now, after_s)
        self.made.setdefault((tenant, key), self.now)
        self.due[tenant, key] = max(self.due.get((tenant, key), 0.0), self.now + after_s)

    @rule(tenant=TENANTS, key=KEYS)
    def redeem(self, tenant: str, key: int) -> None:
        promise = self.promises.redeem(tenant, key)
        due = self.due.pop((tenant, key), None)
        made = self.made.pop((tenant, key), None)
        assert (promise.due if promise else None) == due
        assert (promise.made if promise else None) == made

    @rule(seconds=st.floats(0.1, 10.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        gone = self.promises.expire(self.now)
        for who in list(self.due):
            if self.promises.get(*who) is None:
                assert self.now - self.due[who] >= 2.0, "nobody is given up at once"
                del self.due[who], self.made[who]
                gone -= 1
        assert gone == 0
        assert all(self.now - due <= 2.0 + 0.5 * (due - self.made[who]) + 1e-6 for who, due in self.due.items())

    @invariant()
    def counts_are_right(self) -> None:
        assert len(self.promises) == len(self.due)
        for tenant in ("a", "b"):
            own = [who for who in self.due if who[0] == tenant]
            assert 0.0 <= self.promises.late(tenant) <= self.promises.pending(tenant) <= len(own)
        assert set(self.promises.tenants()) == {tenant for tenant, _ in self.due}


TestKept = Kept.TestCase


def test_places_are_kept_for_the_share_that_comes_back() -> None:
    promises = Promises()
    for key in range(200):
        promises.make("a", key, key, 0.0, 1.0)
    assert promises.pending("a") == pytest.approx(200.0)
    for key in range(0, 200, 2):
        promises.redeem("a", key)
    # the other half stays away
    promises.expire(10.0)
    for key in range(100):
        promises.make("a", key, key, 20.0, 1.0)
    assert promises.pending("a") < 5.0


def test_who_came_in_time_and_found_no_room_is_late_once() -> None:
    promises = Promises()
    promises.make("a", "x", 1, 0.0, 2.0)
    promises.make("a", "x", 1, 1.0, 2.0)
    assert promises.late("a") == 0.0, "it came early"
    promises.make("a", "x", 1, 3.0, 2.0)
    promises.make("a", "x", 1, 5.0, 2.0)
    assert promises.late("a") == 1.0
    promise = promises.redeem("a", "x")
    assert promise is not None
    assert promise.accuracy(8.0) == pytest.approx(2.0 / 8.0), "what was told at first, of what it took"
    assert promises.late("a") == 0.0


def test_no_more_are_remembered_than_there_is_room_for() -> None:
    promises = Promises()
    for key in range(10_000):
        promises.make("a", key, key, 0.0, 1.0)
    assert len(promises) < 5000


def test_no_more_are_remembered_of_many_floods_either() -> None:
    promises = Promises()
    for key in range(300):
        for tenant in range(200):
            promises.make(f"t{tenant}", key, key, 0.0, 1.0)
    assert len(promises) < 10_000
    assert len(promises.tenants()) == 200


def test_a_flood_does_not_take_the_room_of_others() -> None:
    promises = Promises()
    for key in range(10_000):
        promises.make("flood", key, key, 0.0, 1.0)
    for key in range(60):
        promises.make("light", key, key, 0.0, 1.0)
        assert promises.get("light", key) is not None


def test_who_stays_away_is_remembered_by_tenant() -> None:
    promises = Promises()
    for key in range(100):
        promises.make("away", key, key, 0.0, 1.0)
        promises.make("back", key, key, 0.0, 1.0)
        promises.redeem("back", key)
    promises.expire(10.0)
    for tenant in ("away", "back"):
        promises.make(tenant, "new", 1, 20.0, 1.0)
    assert promises.pending("back") == pytest.approx(1.0)
    assert promises.pending("away") < 0.01


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2000), st.booleans()), max_size=300))
def test_tenants_are_bounded_and_each_new_one_finds_room(steps: list[tuple[int, bool]]) -> None:
    promises = Promises()
    for tenant in range(1500):
        promises.make(f"t{tenant}", "k", 1, 0.0, 1.0)
    assert len(promises.tenants()) == len(promises) <= 1024
    for number, comes in steps:
        tenant = f"t{number}"
        if comes:
            promises.redeem(tenant, "k")
        else:
            full = len(promises.tenants()) >= 1024
            promises.make(tenant, "k", 1, 0.0, 1.0)
            assert full or promises.get(tenant, "k") is not None
    assert len(promises) <= 1024


@given(st.floats(0.01, 10.0), st.integers(10, 40))
def test_drain_rate_is_that_of_a_steady_queue(interval_s: float, count: int) -> None:
    drain = DrainRate()
    drain.joined(0.0)
    for departure in range(1, count + 1):
        drain.left(departure * interval_s, waiting=1)
    assert drain.interval_s(interval_s) == pytest.approx(interval_s)
    now = count * interval_s
    assert drain.until(3.0, now, interval_s) == pytest.approx(3.0 * interval_s)
    half = now + interval_s / 2.0
    assert drain.until(3.0, half, interval_s) == pytest.approx(2.5 * interval_s)


def test_times_in_which_nothing_waits_say_nothing_of_the_drain() -> None:
    drain = DrainRate()
    for start in range(0, 100_000, 1000):
        drain.joined(float(start))
        drain.left(float(start), waiting=0)
    assert drain.interval_s(1.0) == pytest.approx(1.0)


def test_a_stalled_queue_makes_estimates_longer() -> None:
    drain = DrainRate()
    drain.joined(0.0)
    for departure in range(1, 20):
        drain.left(float(departure), waiting=5)
    assert drain.until(1.0, 119.0, 1.0) > 2.0


def test_load_whose_bytes_are_at_hand_costs_less() -> None:
    times = LoadTimes(1.0, 1e6)
    times.installed(0.5)
    times.fetched(2.0, 1_000_000)
    assert times.cost(2_000_000, resident=False) == pytest.approx(4.5)
    assert times.cost(2_000_000, resident=True) == pytest.approx(0.5)
