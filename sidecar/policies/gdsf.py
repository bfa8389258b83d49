"""GreedyDual-Size-Frequency: what saves least, for its bytes, leaves first; and everything ages.

Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching", HP Labs 1998. The rank of an
entry is L + frequency * cost / size, where L is the highest rank of those that left.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from .ranking import Ranking

# a cost of nothing would make an entry the first to go however often it is asked for
_LEAST_COST = 1e-6


class _Node:
    __slots__ = ("asked", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.asked = 1


class Gdsf:
    """Counts how often, how large, and how many seconds to bring again."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._ranking = Ranking()
        self._age = 0.0

    def __len__(self) -> int:
        return len(self._nodes)

    def added(self, key: str, size: int, cost: float) -> None:
        node = self._nodes[key] = _Node(max(cost, _LEAST_COST) / size)
        self._ranking.add(key, self._age + node.weight)

    def touched(self, key: str) -> None:
        node = self._nodes.get(key)
        if node is not None:
            node.asked += 1
            self._ranking.raise_to(key, self._age + node.asked * node.weight)

    def victims(self, evictable: Callable[[str], bool]) -> Generator[str, None, None]:
        return self._ranking.lowest(evictable)

    def evicted(self, key: str) -> None:
        del self._nodes[key]
        self._age = max(self._age, self._ranking[key])
        self._ranking.remove(key)
