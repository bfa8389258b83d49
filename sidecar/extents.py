"""Where things lie in the arena: extents, and the best-fit allocator of their ranges. Numbers only, no memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection
from itertools import accumulate

import msgspec

from backends.extent_record import HEADER_BYTES as HEADER_BYTES

# a page: blocks begin at one and take whole ones, so that no two extents share a page
ALIGN = 4096


class Extent(msgspec.Struct, frozen=True, order=True):
    """``length`` bytes of data at ``offset`` of the segment. No two extents of a segment share a ``generation``."""

    offset: int
    length: int
    generation: int


def block_bytes(length: int) -> int:
    """What an extent of ``length`` bytes takes of the arena, its header and the rounding to pages included."""
    return -(-(length + HEADER_BYTES) // ALIGN) * ALIGN


class Allocator:
    """Blocks of a range of ``capacity`` bytes: best fit, neighbours that are free grow together."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGN * ALIGN
        self.used = 0
        self._taken: dict[int, int] = {}
        self._free: dict[int, int] = {}
        self._free_ends: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        if self.capacity:
            self._add_free(0, self.capacity)

    def allocate(self, length: int) -> int | None:
        """The offset of a block of ``length`` bytes (a multiple of ALIGN), or None where no gap is large enough."""
        at = bisect_left(self._by_length, (length, 0))
        if at == len(self._by_length):
            return None
        gap, offset = self._by_length[at]
        self._cut(offset, gap, offset, length)
        return offset

    def replace(self, freed: Collection[int], offset: int, length: int) -> None:
        """Free the blocks at ``freed``, one at least, and allocate ``length`` bytes at ``offset``.

        These blocks, and free ranges between and beside them, cover the range that is allocated.
        """
        gap = 0
        for block in freed:
            gap = self.free(block)
        self._cut(gap, self._free[gap], offset, length)

    def free(self, offset: int) -> int:
        """Give a block back; where the free range begins that it is part of now. Raises KeyError for an offset that is
        not allocated."""
        length = self._taken.pop(offset)
        self.used -= length
        before = self._free_ends.get(offset)
        if before is not None:
            gap = self._free[before]
            self._drop_free(before, gap)
            offset, length = before, gap + length
        after = self._free.get(offset + length)
        if after is not None:
            self._drop_free(offset + length, after)
            length += after
        self._add_free(offset, length)
        return offset

    def length(self, offset: int) -> int:
        """Of the block at ``offset``. Raises KeyError where there is none."""
        return self._taken[offset]

    def gap_before(self, offset: int) -> int:
        """Where the free range that ends at ``offset`` begins; ``offset`` where none does."""
        return self._free_ends.get(offset, offset)

    def gap_after(self, offset: int) -> int:
        """Where the free range that begins at ``offset`` ends; ``offset`` where none does."""
        return offset + self._free.get(offset, 0)

    def blocks(self) -> list[tuple[int, int]]:
        """(offset, length) of all allocated blocks, in order."""
        return sorted(self._taken.items())

    def gaps(self) -> list[tuple[int, int]]:
        """(offset, length) of all free ranges, in order."""
        return sorted(self._free.items())

    def _cut(self, gap: int, size: int, offset: int, length: int) -> None:
        """Take a range out of the free range of ``size`` bytes at ``gap``."""
        self._drop_free(gap, size)
        if offset > gap:
            self._add_free(gap, offset - gap)
        if gap + size > offset + length:
            self._add_free(offset + length, gap + size - offset - length)
        self._taken[offset] = length
        self.used += length

    def _add_free(self, offset: int, length: int) -> None:
        self._free[offset] = length
        self._free_ends[offset + length] = offset
        insort(self._by_length, (length, offset))

    def _drop_free(self, offset: int, length: int) -> None:
        del self._free[offset]
        del self._free_ends[offset + length]
        del self._by_length[bisect_left(self._by_length, (length, offset))]


class Clearing:
    """What the free ranges of ``blocks`` would be if some of its blocks were free too. Changes nothing itself."""

    def __init__(self, blocks: Allocator) -> None:
        self._blocks = blocks
        self._cleared: dict[int, int] = {}
        self._runs: dict[int, int] = {}
        self._run_ends: dict[int, int] = {}

    def clear(self, offset: int) -> tuple[int, int]:
        """Suppose that the block at ``offset`` is free: where the free range around it would begin, and its length."""
        length = self._blocks.length(offset)
        self._cleared[offset] = length
        start, end = offset, offset + length
        start = self._run_ends.pop(start) if start in self._run_ends else self._blocks.gap_before(start)
        end = end + self._runs.pop(end) if end in self._runs else self._blocks.gap_after(end)
        self._runs[start] = end - start
        self._run_ends[end] = start
        return start, end - start

    def cheapest(self, start: int, length: int, need: int) -> tuple[int, list[int]]:
        """Within the free range at ``start``: an offset for ``need`` bytes where the fewest bytes have to be cleared
        for them, and the blocks that have to be."""
        starts = sorted(block for block in self._cleared if start <= block < start + length)
        ends = [block + self._cleared[block] for block in starts]
        total = [0, *accumulate(self._cleared[block] for block in starts)]

        def touched(offset: int) -> tuple[int, int]:
            return bisect_right(ends, offset), bisect_left(starts, offset + need)

        def price(offset: int) -> int:
            first, last = touched(offset)
            return total[last] - total[first]

        # right behind a block, right before one, or at an end: in between the price is not lower
        edges = {start, start + length - need, *ends, *(block - need for block in starts)}
        best = min((edge for edge in sorted(edges) if start <= edge <= start + length - need), key=price)
        first, last = touched(best)
        return best, starts[first:last]
