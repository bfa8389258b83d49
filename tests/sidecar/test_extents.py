"""The arena's allocator: no two blocks overlap, and what is freed can be used again, whole."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from sidecar.cache import ArenaCache
from sidecar.extents import ALIGN, Allocator, block_bytes
from sidecar.policies.lru import Lru

PAGES = 64


class Blocks(RuleBasedStateMachine):
    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(PAGES * ALIGN + 17)
        self.model: dict[int, int] = {}

    @rule(target=taken, pages=st.integers(1, PAGES))
    def allocate(self, pages: int) -> object:
        fits = [length for _, length in self.allocator.gaps() if length >= pages * ALIGN]
        offset = self.allocator.allocate(pages * ALIGN)
        assert (offset is not None) == bool(fits)
        if offset is None:
            return multiple()
        left = sum(length for _, length in self.allocator.gaps())
        assert left == self.allocator.capacity - self.allocator.used
        self.model[offset] = pages * ALIGN
        return offset

    @rule(offset=consumes(taken))
    def free(self, offset: int) -> None:
        self.allocator.free(offset)
        del self.model[offset]

    @invariant()
    def blocks_and_gaps_tile_the_range(self) -> None:
        assert dict(self.allocator.blocks()) == self.model
        assert self.allocator.used == sum(self.model.values())
        edge, last_was_gap = 0, False
        ranges = [(*block, False) for block in self.allocator.blocks()] + [
            (*gap, True) for gap in self.allocator.gaps()
        ]
        for offset, length, gap in sorted(ranges):
            assert offset == edge
            assert not (gap and last_was_gap), "neighbouring gaps are one"
            edge, last_was_gap = offset + length, gap
        assert edge == PAGES * ALIGN


TestBlocks = Blocks.TestCase


def test_best_fit_leaves_the_large_gap_whole() -> None:
    allocator = Allocator(10 * ALIGN)
    first, small, third = (allocator.allocate(pages * ALIGN) for pages in (2, 1, 2))
    assert (first, small, third) == (0, 2 * ALIGN, 3 * ALIGN)
    allocator.free(2 * ALIGN)
    assert allocator.allocate(ALIGN) == 2 * ALIGN


def test_nothing_is_evicted_for_what_would_not_fit_anyway() -> None:
    cache = ArenaCache(4 * ALIGN, Lru())
    for number in range(4):
        assert cache.reserve(str(number), 1000, 0.0, lambda _: False) is not None
        cache.completed(str(number), 1.0)
    cache.pin("1", "an install")
    assert cache.reserve("large", 3 * ALIGN - 100, 2.0, lambda _: False) is None
    assert sorted(cache) == ["0", "1", "2", "3"]
    reserved = cache.reserve("fits", 2 * ALIGN - 100, 2.0, lambda _: False)
    assert reserved is not None
    assert "1" in cache


def test_no_two_extents_share_a_generation() -> None:
    cache = ArenaCache(2 * ALIGN, Lru())
    seen = set()
    for number in range(10):
        reserved = cache.reserve(str(number), 100, 0.0, lambda _: False)
        assert reserved is not None
        cache.completed(str(number), 0.0)
        seen.add(reserved[0].generation)
    assert len(seen) == 10


def test_block_covers_header_and_data() -> None:
    assert block_bytes(1) == ALIGN
    assert block_bytes(ALIGN) == 2 * ALIGN
