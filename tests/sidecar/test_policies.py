"""Cache policies: whatever the history, every key is there once, and each lets the right ones go first."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from sidecar.policies import CachePolicy, PolicyName, make_policy
from sidecar.policies.adaptive import Adaptive
from sidecar.policies.ranking import Ranking

CAPACITY = 1000
SIZES = st.integers(1, 300)
COSTS = st.floats(0.0, 100.0)
ALL = list(PolicyName)


def all_of(policy: CachePolicy) -> list[str]:
    with closing(policy.victims(lambda key: True)) as victims:
        return list(victims)


def first_of(policy: CachePolicy) -> str:
    with closing(policy.victims(lambda key: True)) as victims:
        return next(victims)


class Policy(RuleBasedStateMachine):
    """One policy against a set of keys. Keys come back: the policy may remember them."""

    keys = Bundle("keys")

    @initialize(name=st.sampled_from(ALL))
    def start(self, name: PolicyName) -> None:
        self.policy = make_policy(name, CAPACITY)
        self.present: set[str] = set()

    @rule(target=keys, number=st.integers(0, 30), size=SIZES, cost=COSTS)
    def add(self, number: int, size: int, cost: float) -> str:
        key = str(number)
        if key not in self.present:
            self.policy.added(key, size, cost)
            self.present.add(key)
        return key

    @rule(key=keys)
    def touch(self, key: str) -> None:
        self.policy.touched(key)

    @rule(spared=st.sets(st.integers(0, 30).map(str)), taken=st.integers(0, 5), evicted=st.integers(0, 5))
    def evict(self, spared: set[str], taken: int, evicted: int) -> None:
        found: list[str] = []
        with closing(self.policy.victims(lambda key: key not in spared)) as victims:
            for key in victims:
                found.append(key)
                if len(found) >= taken:
                    break
        assert len(set(found)) == len(found), "offered twice"
        assert set(found) <= self.present - spared
        assert len(found) >= min(taken, len(self.present - spared)), "one that may go was not offered"
        for key in found[:evicted]:
            self.policy.evicted(key)
            self.present.remove(key)

    @rule(spared=st.sets(st.integers(0, 30).map(str)))
    def offers_all_that_may_go(self, spared: set[str]) -> None:
        with closing(self.policy.victims(lambda key: key not in spared)) as victims:
            assert sorted(victims) == sorted(self.present - spared)

    @rule()
    def what_stays_is_first_the_next_time(self) -> None:
        # what is passed over on the first way may move between queues, and the order with it
        all_of(self.policy)
        first = all_of(self.policy)
        assert all_of(self.policy) == first

    @rule(key=consumes(keys))
    def evicting_what_is_not_there_is_a_bug(self, key: str) -> None:
        if key not in self.present:
            with pytest.raises(KeyError):
                self.policy.evicted(key)

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "policy"):
            assert len(self.policy) == len(self.present)


TestPolicy = Policy.TestCase


@pytest.mark.parametrize("name", ALL)
def test_what_nobody_asked_for_again_goes_before_what_everybody_does(name: PolicyName) -> None:
    policy = make_policy(name, CAPACITY)
    for number in range(10):
        policy.added(str(number), 100, 1.0)
    for _ in range(3):
        policy.touched("0")
    assert all_of(policy)[:5] == ["1", "2", "3", "4", "5"]
    policy.evicted("1")
    assert all_of(policy)[:4] == ["2", "3", "4", "5"]


@given(st.lists(st.integers(0, 20), max_size=200))
def test_lru_is_least_recently_used(asks: list[int]) -> None:
    policy = make_policy(PolicyName.LRU, CAPACITY)
    recent: list[str] = []
    for number in asks:
        key = str(number)
        if key in recent:
            policy.touched(key)
            recent.remove(key)
        else:
            policy.added(key, 1, 1.0)
        recent.append(key)
    assert all_of(policy) == recent


def test_sieve_evicts_as_in_the_paper() -> None:
    """The example of the paper's figure: A to G, of which A, B and G were asked for again; H and I come, D is asked."""
    policy = make_policy(PolicyName.SIEVE, CAPACITY)
    for key in "ABCDEFG":
        policy.added(key, 1, 1.0)
    for key in "ABG":
        policy.touched(key)
    evicted = []
    for key in "HI":
        evicted.append(first_of(policy))
        policy.evicted(evicted[-1])
        policy.added(key, 1, 1.0)
    assert evicted == ["C", "D"]
    policy.added("D", 1, 1.0)
    assert all_of(policy)[:3] == ["E", "F", "H"]


def test_s3fifo_keeps_what_a_sweep_would_wash_out() -> None:
    policy = make_policy(PolicyName.S3FIFO, 1000)
    present: set[str] = set()

    def ask(key: str) -> None:
        if key in present:
            policy.touched(key)
            return
        while len(present) >= 10:
            victim = first_of(policy)
            policy.evicted(victim)
            present.remove(victim)
        policy.added(key, 100, 1.0)
        present.add(key)

    hot = [f"hot{number}" for number in range(6)]
    for _ in range(4):
        for key in hot:
            ask(key)
    for number in range(500):
        ask(f"swept{number}")
    assert set(hot) <= present


def test_s3fifo_takes_back_at_once_what_left_too_early() -> None:
    policy = make_policy(PolicyName.S3FIFO, 1000)
    for number in range(10):
        policy.added(str(number), 100, 1.0)
    policy.evicted("0")
    policy.added("0", 100, 1.0)
    assert all_of(policy)[:8] == [str(number) for number in range(1, 9)], (
        "the new ones that nobody came back for go first"
    )


def test_gdsf_lets_go_what_saves_least_for_its_bytes() -> None:
    policy = make_policy(PolicyName.GDSF, CAPACITY)
    policy.added("large", 100, 1.0)
    policy.added("small", 10, 1.0)
    policy.added("dear", 100, 30.0)
    assert all_of(policy) == ["large", "small", "dear"]


def test_gdsf_forgets_the_fame_of_yesterday() -> None:
    policy = make_policy(PolicyName.GDSF, CAPACITY)
    policy.added("famous", 10, 1.0)
    for _ in range(50):
        policy.touched("famous")
    for number in range(2000):
        policy.added(str(number), 10, 1.0)
        policy.touched(str(number))
        victim = first_of(policy)
        policy.evicted(victim)
        if victim == "famous":
            break
    assert victim == "famous"


def test_fading_forgives_what_was_asked_for_often_a_short_absence() -> None:
    policy = make_policy(PolicyName.FADING, CAPACITY)
    policy.added("often", 10, 1.0)
    for _ in range(4):
        policy.touched("often")
    policy.added("once", 100, 1.0)
    assert first_of(policy) == "once"
    policy.evicted("once")
    for number in range(20):
        policy.added(str(number), 100, 1.0)
    order = all_of(policy)
    assert 0 < order.index("often") < 8, "but not a long one"


def asked(policy: Adaptive, present: set[str], keys: Iterable[str]) -> None:
    """Ask for keys of 100 bytes each, in a cache that has room for ten."""
    for key in keys:
        if key in present:
            policy.touched(key)
            continue
        if len(present) == 10:
            victim = first_of(policy)
            policy.evicted(victim)
            present.remove(victim)
        policy.added(key, 100, 1.0)
        present.add(key)


def test_adaptive_decides_as_what_was_asked_for_lately_would_have_wanted_it() -> None:
    policy = Adaptive(CAPACITY)
    present: set[str] = set()
    asked(policy, present, swept(1000))
    assert not policy.cautious
    asked(policy, present, recent(1000))
    assert policy.cautious
    asked(policy, present, swept(1000))
    assert not policy.cautious


def swept(count: int) -> Iterator[str]:
    """Asks of seven keys, and as many of keys that are never asked for again."""
    rng = random.Random(1)
    for number in range(count):
        yield rng.choice((f"hot{rng.randrange(7)}", f"swept{number}"))


def recent(count: int) -> Iterator[str]:
    """Asks of forty keys, where the one asked for last is the likeliest to come next, and so on back."""
    rng = random.Random(1)
    order = [f"recent{number}" for number in range(40)]
    for _ in range(count):
        key = order.pop(min(39, int(rng.expovariate(1 / 5))))
        order.insert(0, key)
        yield key


@given(st.lists(st.tuples(st.sampled_from("adr"), st.integers(0, 8), st.floats(0, 100)), max_size=300))
def test_ranking_is_the_sorted_order(steps: list[tuple[str, int, float]]) -> None:
    ranking, model = Ranking(), {}
    for place, (step, number, by) in enumerate(steps):
        key = str(number)
        if step == "a" and key not in model:
            model[key] = by, place
            ranking.add(key, by)
        elif step == "r" and key in model:
            model[key] = model[key][0] + by, model[key][1]
            ranking.raise_to(key, model[key][0])
        elif step == "d" and key in model:
            del model[key]
            ranking.remove(key)
    assert list(ranking.lowest(lambda key: True)) == sorted(model, key=model.__getitem__)
    assert {key: ranking[key] for key in model} == {key: rank for key, (rank, _) in model.items()}


@pytest.mark.parametrize("name", ALL)
def test_what_left_is_not_remembered_for_ever(name: PolicyName) -> None:
    """Whoever decided what leaves: a policy may be told of evictions for long without being asked for any."""
    policy = make_policy(name, CAPACITY)
    tracemalloc.start()
    for number in range(3000):
        policy.added(str(number), 100, 1.0)
        policy.evicted(str(number))
        if number == 1000:
            before = tracemalloc.get_traced_memory()[0]
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000, "10 bytes a key that is gone"
