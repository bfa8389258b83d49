"""Where things lie in the arena: extents, and the best-fit allocator of their ranges. Numbers only, no memory."""

from __future__ import annotations

from bisect import bisect_left, insort

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
        self._drop_free(offset, gap)
        if gap > length:
            self._add_free(offset + length, gap - length)
        self._taken[offset] = length
        self.used += length
        return offset

    def free(self, offset: int) -> None:
        """Give a block back. Raises KeyError for an offset that is not allocated."""
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

    def blocks(self) -> list[tuple[int, int]]:
        """(offset, length) of all allocated blocks, in order."""
        return sorted(self._taken.items())

    def gaps(self) -> list[tuple[int, int]]:
        """(offset, length) of all free ranges, in order."""
        return sorted(self._free.items())

    def _add_free(self, offset: int, length: int) -> None:
        self._free[offset] = length
        self._free_ends[offset + length] = offset
        insort(self._by_length, (length, offset))

    def _drop_free(self, offset: int, length: int) -> None:
        del self._free[offset]
        del self._free_ends[offset + length]
        del self._by_length[bisect_left(self._by_length, (length, offset))]
