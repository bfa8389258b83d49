"""GreedyDual-Size-Frequency: what saves least, for its bytes, leaves first; and everything ages.

Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching", HP Labs 1998. The priority of
an entry is L + frequency * cost / size, where L is the priority of the last one that left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator

# a cost of nothing would make an entry the first to go however often it is asked for
_LEAST_COST = 1e-6


class _Node:
    __slots__ = ("asked", "order", "priority", "weight")

    def __init__(self, order: int, weight: float, priority: float) -> None:
        self.order = order
        self.weight = weight
        self.asked = 1
        self.priority = priority


class Gdsf:
    """Counts how often, how large, and how many seconds to bring again."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        # one entry a key, at a priority that the key had once: priorities only grow
        self._heap: list[tuple[float, int, str]] = []
        self._age = 0.0
        self._order = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def added(self, key: str, size: int, cost: float) -> None:
        self._order += 1
        weight = max(cost, _LEAST_COST) / size
        node = self._nodes[key] = _Node(self._order, weight, self._age + weight)
        heapq.heappush(self._heap, (node.priority, node.order, key))

    def touched(self, key: str) -> None:
        node = self._nodes.get(key)
        if node is not None:
            node.asked += 1
            node.priority = self._age + node.asked * node.weight

    def victims(self, evictable: Callable[[str], bool]) -> Generator[str, None, None]:
        held: list[tuple[float, int, str]] = []
        try:
            while self._heap:
                priority, order, key = heapq.heappop(self._heap)
                node = self._nodes.get(key)
                if node is None or node.order != order:
                    continue
                if node.priority > priority:
                    heapq.heappush(self._heap, (node.priority, order, key))
                    continue
                held.append((priority, order, key))
                if evictable(key):
                    yield key
        finally:
            for entry in held:
                heapq.heappush(self._heap, entry)

    def evicted(self, key: str) -> None:
        self._age = max(self._age, self._nodes.pop(key).priority)
