"""Keys in the order of a number that only grows."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator

# a heap this small is not worth rebuilding
_MIN_REBUILD = 64


class Ranking:
    """The heap has one entry a key, at a number that the key had once; it is corrected when it comes up.

    A removed key stays in the heap until it comes up or such keys outnumber the others.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, key: str) -> float:
        return self._ranks[key][0]

    def add(self, key: str, rank: float) -> None:
        self._order += 1
        self._ranks[key] = rank, self._order
        heapq.heappush(self._heap, (rank, self._order, key))
        if len(self._heap) > 2 * len(self._ranks) + _MIN_REBUILD:
            self._heap = [(rank, order, key) for key, (rank, order) in self._ranks.items()]
            heapq.heapify(self._heap)

    def raise_to(self, key: str, rank: float) -> None:
        """``rank`` is not below the one that the key has."""
        self._ranks[key] = rank, self._ranks[key][1]

    def remove(self, key: str) -> None:
        """Raises KeyError where it is not there."""
        del self._ranks[key]

    def lowest(self, wanted: Callable[[str], bool]) -> Generator[str, None, None]:
        """The keys that are ``wanted``, lowest first, of equal ones the one added first. Nothing changes meanwhile."""
        held: list[tuple[float, int, str]] = []
        try:
            while self._heap:
                rank, order, key = heapq.heappop(self._heap)
                present = self._ranks.get(key)
                if present is None or present[1] != order:
                    continue
                if present[0] > rank:
                    heapq.heappush(self._heap, (present[0], order, key))
                    continue
                held.append((rank, order, key))
                if wanted(key):
                    yield key
        finally:
            for entry in held:
                heapq.heappush(self._heap, entry)
