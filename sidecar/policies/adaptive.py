"""Two policies, and the one that would have missed fewer bytes lately decides.

No one policy is best: S3-FIFO holds on to what is popular and lets sweeps pass, and loses where what was asked for
last is asked for next, as after the publishes of a training run. So both keep their own order of what the cache
holds, and each is also replayed over a cache of keys alone, of the same size, as if it had decided alone all along.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing

from .fading import Fading
from .interface import CachePolicy
from .s3fifo import S3Fifo

# caches full of missed bytes until a miss counts half
_MEMORY = 4.0
# by how much of its misses the cautious one has to be better before it decides
_MARGIN = 0.01


class Adaptive:
    """S3-FIFO, and Fading with a short memory where that has been better. Neither counts cost."""

    def __init__(self, capacity: int) -> None:
        self._sizes: dict[str, int] = {}
        self._bold: CachePolicy = S3Fifo(capacity)
        self._cautious: CachePolicy = Fading(capacity)
        self._bold_alone = _Alone(S3Fifo(capacity), capacity)
        self._cautious_alone = _Alone(Fading(capacity), capacity)
        self._half_life = capacity * _MEMORY
        # bytes that the bold one missed and the cautious one did not, less the reverse; and what the cautious missed
        self._behind = 0.0
        self._missed = 0.0
        self.cautious = False
        """Whether the cautious policy decides now."""

    def __len__(self) -> int:
        return len(self._sizes)

    def added(self, key: str, size: int, cost: float) -> None:
        self._sizes[key] = size
        self._bold.added(key, size, cost)
        self._cautious.added(key, size, cost)
        self._compare(key, size, cost)

    def touched(self, key: str) -> None:
        size = self._sizes.get(key)
        if size is not None:
            self._bold.touched(key)
            self._cautious.touched(key)
            self._compare(key, size, 0.0)

    def victims(self, evictable: Callable[[str], bool]) -> Generator[str, None, None]:
        return (self._cautious if self.cautious else self._bold).victims(evictable)

    def evicted(self, key: str) -> None:
        del self._sizes[key]
        self._bold.evicted(key)
        self._cautious.evicted(key)

    def _compare(self, key: str, size: int, cost: float) -> None:
        bold, cautious = self._bold_alone.missed(key, size, cost), self._cautious_alone.missed(key, size, cost)
        if not bold and not cautious:
            return
        fade = 0.5 ** (size / self._half_life)
        self._behind = self._behind * fade + size * (bold - cautious)
        self._missed = self._missed * fade + size * cautious
        if self._behind > _MARGIN * self._missed:
            self.cautious = True
        elif self._behind < 0.0:
            self.cautious = False


class _Alone:
    """A cache of ``capacity`` bytes, of which there are only the keys, under one policy."""

    def __init__(self, policy: CachePolicy, capacity: int) -> None:
        self._policy = policy
        self._sizes: dict[str, int] = {}
        self._free = capacity

    def missed(self, key: str, size: int, cost: float) -> bool:
        """Ask for ``key``, and have it from now on."""
        if key in self._sizes:
            self._policy.touched(key)
            return False
        self._make_room(size)
        self._sizes[key] = size
        self._free -= size
        self._policy.added(key, size, cost)
        return True

    def _make_room(self, size: int) -> None:
        leaving: list[str] = []
        if self._free < size:
            with closing(self._policy.victims(lambda key: True)) as victims:
                for key in victims:
                    leaving.append(key)
                    self._free += self._sizes.pop(key)
                    if self._free >= size:
                        break
        for key in leaving:
            self._policy.evicted(key)
