"""S3-FIFO: three queues that separate what is asked once from what is asked again.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. New entries pass a small queue; what was
asked for again there goes on into the main one, the rest leaves early and its key is remembered for a while. What
comes back while it is remembered goes straight into the main queue, where being asked for saves an entry for as many
rounds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator

# of the bytes: what the small queue may have before it is the one to give
_SMALL_SHARE = 0.1
_MOST_COUNTED = 3
# how often an entry was asked for in the small queue to go on
_ENOUGH = 2


class _Node:
    __slots__ = ("asked", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked = 0


class S3Fifo:
    """Queues have shares of bytes, ``capacity`` in all. Cost does not count."""

    def __init__(self, capacity: int) -> None:
        self._small_share = int(capacity * _SMALL_SHARE)
        self._small: OrderedDict[str, _Node] = OrderedDict()
        self._main: OrderedDict[str, _Node] = OrderedDict()
        self._small_bytes = 0
        self._ghosts = Ghosts(capacity - self._small_share)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def added(self, key: str, size: int, cost: float) -> None:
        if self._ghosts.forget(key):
            self._main[key] = _Node(size)
        else:
            self._small[key] = _Node(size)
            self._small_bytes += size

    def touched(self, key: str) -> None:
        node = self._small.get(key) or self._main.get(key)
        if node is not None and node.asked < _MOST_COUNTED:
            node.asked += 1

    def victims(self, evictable: Callable[[str], bool]) -> Generator[str, None, None]:
        held_small: list[tuple[str, _Node]] = []
        held_main: list[tuple[str, _Node]] = []
        try:
            while self._small or self._main:
                if self._small and (self._small_bytes > self._small_share or not self._main):
                    key, node = self._small.popitem(last=False)
                    self._small_bytes -= node.size
                    if node.asked >= _ENOUGH and evictable(key):
                        node.asked = 0
                        self._main[key] = node
                        continue
                    held_small.append((key, node))
                else:
                    key, node = self._main.popitem(last=False)
                    if node.asked and evictable(key):
                        node.asked -= 1
                        self._main[key] = node
                        continue
                    held_main.append((key, node))
                if evictable(key):
                    yield key
        finally:
            for key, node in reversed(held_small):
                self._small[key] = node
                self._small.move_to_end(key, last=False)
                self._small_bytes += node.size
            for key, node in reversed(held_main):
                self._main[key] = node
                self._main.move_to_end(key, last=False)

    def evicted(self, key: str) -> None:
        node = self._small.pop(key, None)
        if node is None:
            del self._main[key]
        else:
            self._small_bytes -= node.size
            self._ghosts.remember(key, node.size)


class Ghosts:
    """Keys of what left lately, the newest ``capacity`` bytes of it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def remember(self, key: str, size: int) -> None:
        self.forget(key)
        self._sizes[key] = size
        self._bytes += size
        while self._bytes > self._capacity:
            _, oldest = self._sizes.popitem(last=False)
            self._bytes -= oldest

    def forget(self, key: str) -> bool:
        """Whether it was remembered."""
        size = self._sizes.pop(key, None)
        if size is None:
            return False
        self._bytes -= size
        return True
