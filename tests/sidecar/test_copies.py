"""The index of the disk tier: bytes exact, nothing lost, nothing twice."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sidecar.copies import Copies
from sidecar.policies import PolicyName, make_policy
from wire.outcomes import StorageFull

BUDGET = 1000


class Index(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(list(PolicyName)))
    def start(self, name: PolicyName) -> None:
        self.policy = make_policy(name, BUDGET)
        self.copies = Copies(BUDGET, self.policy)
        self.sizes: dict[str, int] = {}

    @rule(
        number=st.integers(0, 30),
        size=st.integers(1, 1200),
        shortage=st.integers(-5000, 1200),
        kept=st.booleans(),
        stays=st.data(),
    )
    def keep(self, number: int, size: int, shortage: int, kept: bool, stays: st.DataObject) -> None:
        digest, used = str(number), sum(self.sizes.values())
        if digest in self.sizes:
            return
        try:
            leaving = self.copies.reserve(size, shortage=shortage)
        except StorageFull:
            assert size > BUDGET or shortage > used
            return
        freed = sum(self.sizes.pop(left) for left in leaving)
        assert freed >= shortage
        assert self.copies.used == used - freed + size <= BUDGET
        self.copies.settle(digest, size, kept=kept)
        if kept:
            self.sizes[digest] = size
            return
        for left in stays.draw(st.lists(st.sampled_from(sorted(leaving)), unique=True)) if leaving else ():
            self.copies.put_back(left, leaving[left])
            self.sizes[left] = leaving[left]

    @rule(number=st.integers(0, 30))
    def touch(self, number: int) -> None:
        self.copies.touch(str(number))

    @rule(number=st.integers(0, 30))
    def forget(self, number: int) -> None:
        assert self.copies.forget(str(number)) == (str(number) in self.sizes)
        self.sizes.pop(str(number), None)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "copies"):
            assert self.copies.used == sum(self.sizes.values()) <= BUDGET
            assert len(self.policy) == len(self.sizes)
            assert all(digest in self.copies for digest in self.sizes)


TestIndex = Index.TestCase


def test_no_more_leaves_than_must() -> None:
    copies = Copies(BUDGET, make_policy(PolicyName.LRU, BUDGET))
    for digest in ("a", "b", "c"):
        assert copies.reserve(300) == {}
        copies.settle(digest, 300, kept=True)
    copies.touch("a")
    assert copies.reserve(200) == {"b": 300}
    copies.settle("d", 200, kept=False)
    assert copies.used == 600


def test_what_can_never_fit_makes_nothing_leave() -> None:
    copies = Copies(BUDGET, make_policy(PolicyName.LRU, BUDGET))
    copies.reserve(600)
    copies.settle("a", 600, kept=True)
    with pytest.raises(StorageFull, match="no room for 1001 bytes"):
        copies.reserve(BUDGET + 1)
    with pytest.raises(StorageFull):
        copies.reserve(10, shortage=601)
    assert "a" in copies
