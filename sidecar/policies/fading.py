"""Fading frequency: how often an entry was asked for, where what is past counts less and less.

Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least frequently used policies",
IEEE Transactions on Computers 2001. Every ask counts one, and half of that once ``memory`` caches full of bytes have
been asked for. With a short memory it is LRU that forgives an entry which was asked for often a short absence.

Scores at one moment are in the order of ``log2(count) + moment / half-life``, which does not change until the next ask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

from .ranking import Ranking

_HALF_LIVES_REMEMBERED = 60.0


class _Node:
    __slots__ = ("at", "log_count", "size")

    def __init__(self, size: int, at: float) -> None:
        self.size = size
        self.log_count = 0.0
        self.at = at


class Fading:
    """Counts how often and how long ago; sizes only as the measure of time. Cost does not count."""

    def __init__(self, capacity: int, memory: float = 0.25) -> None:
        self._half_life = capacity * memory
        self._nodes: dict[str, _Node] = {}
        self._ranking = Ranking()
        # bytes asked for, in half-lives
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._nodes)

    def added(self, key: str, size: int, cost: float) -> None:
        self._now += size / self._half_life
        self._nodes[key] = _Node(size, self._now)
        self._ranking.add(key, self._now)

    def touched(self, key: str) -> None:
        node = self._nodes.get(key)
        if node is None:
            return
        self._now += node.size / self._half_life
        faded = max(node.log_count - (self._now - node.at), -_HALF_LIVES_REMEMBERED)
        node.log_count = math.log2(1.0 + 2.0**faded)
        node.at = self._now
        self._ranking.raise_to(key, node.log_count + self._now)

    def victims(self, evictable: Callable[[str], bool]) -> Generator[str, None, None]:
        return self._ranking.lowest(evictable)

    def evicted(self, key: str) -> None:
        del self._nodes[key]
        self._ranking.remove(key)
