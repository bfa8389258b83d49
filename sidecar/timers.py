"""Many deadlines, cheap to set and to cancel."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

# a heap this small is not worth rebuilding
_MIN_REBUILD = 64


class Timers(Generic[K]):
    """One deadline a key. A cancelled entry stays in the heap until it comes up or outnumbers the live ones."""

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: K, at: float) -> None:
        """Set or move the deadline of ``key``."""
        self._at[key] = at
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, key))
        if len(self._heap) > 2 * len(self._at) + _MIN_REBUILD:
            self._rebuild()

    def cancel(self, key: K) -> None:
        self._at.pop(key, None)

    def due(self, now: float) -> list[K]:
        """The keys whose deadline has passed, oldest first; they are gone from the timers."""
        keys = []
        while self._heap and self._heap[0][0] <= now:
            at, _, key = heapq.heappop(self._heap)
            if self._at.get(key) == at:
                del self._at[key]
                keys.append(key)
        return keys

    def _rebuild(self) -> None:
        self._heap = [(at, order, key) for order, (key, at) in enumerate(self._at.items())]
        self._order = len(self._heap)
        heapq.heapify(self._heap)
