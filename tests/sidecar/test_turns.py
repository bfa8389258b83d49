"""Turns: nobody waits longer than a round, everybody gets as much, the light before the heavy."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sidecar.admission import LoadQueue
from sidecar.turns import LONGEST, Charge, Turns

from .bench import settings

TENANTS = ("a", "b", "c", "d")
COSTS = st.floats(1e-3, 100.0)
BACKLOGS = st.dictionaries(st.sampled_from(TENANTS), st.lists(COSTS, min_size=1, max_size=30), min_size=1)


class Queue:
    """Items are numbers in the order of their coming; ``served`` is who got what, in order."""

    def __init__(self) -> None:
        self.turns: Turns[int] = Turns()
        self.cost: dict[int, float] = {}
        self.tenant: dict[int, str] = {}
        self.served: list[int] = []
        self.charges: dict[int, Charge] = {}

    def add(self, tenant: str, cost: float = 1.0) -> int:
        item = len(self.cost)
        self.cost[item] = cost
        self.tenant[item] = tenant
        self.turns.add(tenant, item, cost)
        return item

    def serve(self, count: int, blocked: frozenset[int] = frozenset()) -> list[int]:
        """Give ``count`` items their turn, as permits allow: each time anew, as a machine does it."""
        served: list[int] = []
        while len(served) < count:
            item = next((item for item in self.turns.order() if item not in blocked), None)
            if item is None:
                break
            self.turns.remove(self.tenant[item], item)
            if (charge := self.turns.charge(self.tenant[item], self.cost[item])) is not None:
                self.charges[item] = charge
            served.append(item)
        self.served += served
        return served


@given(BACKLOGS)
def test_everything_is_served_once_and_each_tenants_in_their_order(backlogs: dict[str, list[float]]) -> None:
    queue = Queue()
    for tenant, costs in backlogs.items():
        for cost in costs:
            queue.add(tenant, cost)
    queue.serve(1000)
    assert sorted(queue.served) == sorted(queue.cost)
    for tenant in backlogs:
        own = [item for item in queue.served if queue.tenant[item] == tenant]
        assert own == sorted(own)
    assert len(queue.turns) == 0


@given(BACKLOGS, st.integers(1, 120))
def test_tenants_that_wait_all_the_time_get_at_least_half_as_much(backlogs: dict[str, list[float]], count: int) -> None:
    queue = Queue()
    for tenant, costs in backlogs.items():
        for cost in costs:
            queue.add(tenant, cost)
    largest = max(queue.cost.values())
    got = dict.fromkeys(backlogs, 0.0)
    for _ in range(count):
        if any(not queue.turns.of(tenant) for tenant in backlogs):
            break
        (item,) = queue.serve(1)
        got[queue.tenant[item]] += queue.cost[item]
        assert max(got.values()) <= LONGEST * (min(got.values()) + largest) + largest + 1e-6


@given(st.lists(st.floats(1.0, 10.0), min_size=40, max_size=80), st.integers(2, 4))
def test_tenants_of_which_as_much_waits_get_as_much(costs: list[float], tenants: int) -> None:
    queue = Queue()
    for cost in costs:
        for tenant in TENANTS[:tenants]:
            queue.add(tenant, cost)
    got = dict.fromkeys(TENANTS[:tenants], 0.0)
    for item in queue.serve(20 * tenants):
        got[queue.tenant[item]] += queue.cost[item]
        assert max(got.values()) - min(got.values()) <= 3.0 * max(costs)


@given(st.integers(2, 200), st.integers(0, 199), st.lists(st.sampled_from(TENANTS[1:]), unique=True))
def test_first_item_of_a_tenant_waits_for_no_more_than_one_of_each_other(
    flood: int, served: int, others: list[str]
) -> None:
    queue = Queue()
    for _ in range(flood):
        queue.add("a")
    queue.serve(min(served, flood - 1))
    firsts = [queue.add(tenant) for tenant in others]
    before = 0 if served else 1
    assert queue.serve(before + len(firsts))[before:] == firsts


def test_all_wait_about_as_long_among_tenants_of_which_more_and_less_waits() -> None:
    queue = Queue()
    for tenant, count in (("a", 24), ("b", 16), ("c", 12)):
        for _ in range(count):
            queue.add(tenant)
    queue.serve(48)
    ends = [max(place for place, item in enumerate(queue.served) if queue.tenant[item] == tenant) for tenant in "ab"]
    assert min(ends) >= 36


def test_flood_gains_nothing() -> None:
    queue = Queue()
    for _ in range(400):
        queue.add("flood")
    for tenant in ("light", "lighter"):
        for _ in range(30):
            queue.add(tenant)
    counts = Counter(queue.tenant[item] for item in queue.serve(75))
    assert all(abs(count - 25) <= 1 for count in counts.values())


def test_newcomer_goes_ahead_of_a_flood_but_not_again_and_again() -> None:
    queue = Queue()
    for _ in range(100):
        queue.add("flood")
    queue.serve(10)
    served: list[str] = []
    for _ in range(40):
        # it comes again at once, each time with one item
        queue.add("light")
        served += [queue.tenant[item] for item in queue.serve(2)]
    assert served[0] == "light"
    counts = Counter(served)
    assert counts["light"] >= counts["flood"] / LONGEST - 1


def test_small_items_get_as_many_turns_as_their_cost_is_small() -> None:
    queue = Queue()
    for _ in range(400):
        queue.add("small", 1.0)
    for _ in range(200):
        queue.add("large", 10.0)
    counts = Counter(queue.tenant[item] for item in queue.serve(110))
    # ten to one, and the turns of the small ones are up to twice as long
    assert 10.0 <= counts["small"] / counts["large"] <= 22.0


def test_one_large_item_does_not_make_turns_long_for_ever() -> None:
    queue = Queue()
    queue.add("a", 100.0)
    for _ in range(400):
        queue.add("a")
        queue.add("b")
    # until the other has had as much
    queue.serve(300)
    tenants = [queue.tenant[item] for item in queue.serve(100)]
    assert max(len(list(turn)) for _, turn in itertools.groupby(tenants)) <= LONGEST


def test_what_cannot_go_now_keeps_its_turn_and_holds_nobody_up() -> None:
    queue = Queue()
    stuck = queue.add("a")
    later = queue.add("a")
    other = queue.add("b")
    assert set(queue.serve(2, blocked=frozenset({stuck}))) == {later, other}
    queue.add("b")
    assert queue.serve(1) == [stuck]


def test_turn_taken_in_vain_costs_nothing() -> None:
    queue = Queue()
    for _ in range(4):
        queue.add("a")
        queue.add("b")
    (first,) = queue.serve(1)
    tenant = queue.tenant[first]
    queue.turns.add(tenant, first, 1.0)
    queue.turns.give_back(queue.charges[first])
    counts = Counter(queue.tenant[item] for item in queue.serve(4))
    assert counts == {"a": 2, "b": 2}


def test_as_much_is_given_back_as_was_charged() -> None:
    queue = Queue()
    others = [queue.add("b") for _ in range(12)]
    queue.add("a")
    for _ in range(10):
        # its turns are long when this one comes, and not any more when it is found to be in vain
        own = [queue.add("a") for _ in range(24)]
        queue.turns.remove("a", own[0])
        charge = queue.turns.charge("a", 1.0)
        for item in own[1:]:
            queue.turns.remove("a", item)
        queue.turns.add("a", own[0], 1.0)
        assert charge is not None
        queue.turns.give_back(charge)
        queue.turns.remove("a", own[0])
    queue.serve(1)
    for _ in others:
        queue.add("a")
    counts = Counter(queue.tenant[item] for item in queue.serve(12))
    assert abs(counts["a"] - counts["b"]) <= 2


def test_what_was_forgotten_since_is_not_given_back() -> None:
    queue = Queue()
    queue.add("b")
    first = queue.add("a")
    queue.turns.remove("a", first)
    charge = queue.turns.charge("a", 8.0)
    assert charge is not None
    for _ in range(40):
        queue.add("b")
    queue.serve(20)
    for _ in range(20):
        queue.add("a")
    queue.turns.give_back(charge)
    counts = Counter(queue.tenant[item] for item in queue.serve(20))
    assert abs(counts["a"] - counts["b"]) <= 2


def test_turns_in_vain_are_made_up_for_though_others_had_theirs_meanwhile() -> None:
    queue = Queue()
    for _ in range(20):
        queue.add("a")
        queue.add("b")
    vain = [item for item in queue.serve(10) if queue.tenant[item] == "a"]
    for item in vain:
        queue.turns.add("a", item, 1.0)
        queue.turns.give_back(queue.charges[item])
    assert queue.serve(len(vain)) == vain


def test_who_has_most_waiting() -> None:
    queue = Queue()
    for tenant in ("a", "b", "b", "c", "c", "c"):
        queue.add(tenant)
    assert queue.turns.longest(2) == [("c", 3), ("b", 2)]
    assert queue.turns.youngest("c") == 5
    assert queue.turns.items("b") == [1, 2]


def test_load_that_bounces_is_not_given_back_what_it_was_never_charged() -> None:
    loads = LoadQueue(settings())
    large = loads.add("base", "a@00", "00", 10_000_000_000, 8, 0.0)
    # nobody else waits
    loads.start(large, 0.0, resident=False)
    for number in range(1, 41):
        for tenant in "ab":
            loads.add("base", f"{tenant}@{number:02}", f"{tenant}{number}", 10_000, 8, 0.0)
    loads.requeue(large, 0.0)
    loads.remove(large, 0.0)
    counts: Counter[str] = Counter()
    for _ in range(20):
        load = next(loads.order())
        loads.start(load, 0.0, resident=False)
        counts[load.tenant] += 1
    assert abs(counts["a"] - counts["b"]) <= 2
