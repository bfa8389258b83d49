"""The arena's index: no two extents overlap, bytes are counted exactly, what is held is never evicted."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sidecar.cache import ArenaCache
from sidecar.extents import ALIGN, HEADER_BYTES, block_bytes
from sidecar.policies import PolicyName, make_policy
from sidecar.policies.lru import Lru

from .bench import Bench

PAGES = 40
NUMBERS = st.integers(0, 25)


class Cache(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(list(PolicyName)))
    def start(self, name: PolicyName) -> None:
        self.policy = make_policy(name, PAGES * ALIGN)
        self.cache = ArenaCache(PAGES * ALIGN + 100, self.policy)
        self.sizes: dict[str, int] = {}
        self.ready: set[str] = set()
        self.pins: dict[str, set[str]] = {}
        self.now = 0.0

    @rule(number=NUMBERS, pages=st.integers(1, 12), leased=st.sets(NUMBERS.map(str)))
    def reserve(self, number: int, pages: int, leased: set[str]) -> None:
        key, size = str(number), pages * ALIGN - HEADER_BYTES
        if key in self.sizes:
            return
        held = {other for other in self.sizes if other not in self.ready or self.pins.get(other) or other in leased}
        reserved = self.cache.reserve(key, size, self.now, leased.__contains__)
        assert (reserved is not None) == self.could_fit(size, held)
        if reserved is None:
            return
        extent, evicted = reserved
        assert extent.length == size
        start, end = extent.offset - HEADER_BYTES, extent.offset + size
        for victim, where in evicted:
            assert victim not in held
            assert where.offset - HEADER_BYTES < end, "evicted for room elsewhere"
            assert where.offset + where.length > start, "evicted for room elsewhere"
            del self.sizes[victim]
            self.ready.discard(victim)
            self.pins.pop(victim, None)
        self.sizes[key] = size

    def could_fit(self, size: int, held: set[str]) -> bool:
        edge = 0
        for extent in sorted(self.cache.extent(key) for key in held):
            if extent.offset - HEADER_BYTES - edge >= block_bytes(size):
                return True
            edge = extent.offset - HEADER_BYTES + block_bytes(extent.length)
        return self.cache.capacity - edge >= block_bytes(size)

    @precondition(lambda self: self.sizes.keys() - self.ready)
    @rule(data=st.data(), works=st.booleans())
    def bytes_come(self, data: st.DataObject, works: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.sizes.keys() - self.ready)))
        self.now += 1.0
        if works:
            self.cache.completed(key, self.now)
            self.ready.add(key)
        else:
            self.cache.discard(key)
            del self.sizes[key]
            self.pins.pop(key, None)

    @rule(number=NUMBERS)
    def touch(self, number: int) -> None:
        self.cache.touch(str(number))

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), owner=st.sampled_from(("a", "b")))
    def pin(self, data: st.DataObject, owner: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.sizes)))
        self.cache.pin(key, owner)
        self.pins.setdefault(key, set()).add(owner)

    @rule(number=NUMBERS, owner=st.sampled_from(("a", "b")))
    def unpin(self, number: int, owner: str) -> None:
        self.cache.unpin(str(number), owner)
        self.pins.get(str(number), set()).discard(owner)

    @invariant()
    def is_what_it_should_be(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert set(self.cache) == self.sizes.keys()
        assert self.cache.used == sum(block_bytes(size) for size in self.sizes.values()) <= PAGES * ALIGN
        assert len(self.policy) == len(self.ready)
        edge = 0
        for extent in sorted(self.cache.extent(key) for key in self.sizes):
            assert extent.offset - HEADER_BYTES >= edge
            edge = extent.offset + extent.length
        assert edge <= PAGES * ALIGN


TestCache = Cache.TestCase


def filled(pages: list[int]) -> ArenaCache:
    """An arena that ends with the last of these, each complete and asked for in this order."""
    cache = ArenaCache(sum(pages) * ALIGN, Lru())
    for number, count in enumerate(pages):
        assert cache.reserve(str(number), count * ALIGN - HEADER_BYTES, 0.0, lambda _: False) is not None
        cache.completed(str(number), 1.0)
    return cache


def test_only_what_lies_where_the_room_is_made_is_evicted() -> None:
    cache = filled([1, 1, 1, 1, 1, 1])
    for number in (0, 2, 4, 5, 3, 1):
        cache.touch(str(number))
    reserved = cache.reserve("large", 2 * ALIGN - HEADER_BYTES, 2.0, lambda _: False)
    assert reserved is not None
    assert {victim for victim, _ in reserved[1]} == {"4", "5"}, "0 and 2 are older, and no two of them are neighbours"


def test_a_large_one_makes_way_for_several_small_ones() -> None:
    cache = filled([4, 1])
    for number in range(4):
        reserved = cache.reserve(f"small{number}", ALIGN - HEADER_BYTES, 2.0, lambda _: False)
        assert reserved is not None
        assert [victim for victim, _ in reserved[1]] == (["0"] if number == 0 else [])
        cache.completed(f"small{number}", 2.0)
    assert cache.resident("1")


class Counting(Lru):
    """LRU that counts what it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def added(self, key: str, size: int, cost: float) -> None:
        self.told.append("added")
        super().added(key, size, cost)

    def touched(self, key: str) -> None:
        self.told.append("touched")
        super().touched(key)


def test_a_load_counts_once_for_all_who_waited_for_it_and_every_hot_ask_for_itself() -> None:
    bench = Bench(slots=1)
    policy = bench.machine.state.cache.policy = Counting()
    asks = [bench.ask(1) for _ in range(5)]
    bench.fetched(1)
    bench.installed(1)
    assert policy.told == ["added"]
    bench.release(*asks, bench.ask(1))
    assert policy.told == ["added", "touched"]
    bench.wait(60.0)
    other = bench.ask(2)
    bench.fetched(2)
    bench.removed(1)
    bench.installed(2)
    bench.release(other)
    bench.wait(60.0)
    policy.told.clear()
    bench.ask(1)
    bench.removed(2)
    bench.installed(1)
    assert policy.told == ["touched"], "its bytes were there"
