"""SIEVE: a queue, a bit for each entry, and a hand that takes the first entry without one.

Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024. Entries never move; the hand goes from the oldest to the newest,
clears the bits that it passes, and begins again. Here the queue is kept as its two halves, before and behind the hand.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator


class Sieve:
    """Size and cost don't count."""

    def __init__(self) -> None:
        # whether each was asked for since the hand passed it
        self._ahead: OrderedDict[str, bool] = OrderedDict()
        self._behind: OrderedDict[str, bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ahead) + len(self._behind)

    def added(self, key: str, size: int, cost: float) -> None:
        self._ahead[key] = False

    def touched(self, key: str) -> None:
        half = self._half(key)
        if half is not None:
            half[key] = True

    def victims(self, evictable: Callable[[str], bool]) -> Generator[str, None, None]:
        yielded: list[str] = []
        try:
            # one round clears every bit, and the next takes whatever may be taken
            for _ in range(2 * len(self)):
                if not self._ahead:
                    self._ahead, self._behind = self._behind, self._ahead
                if not self._ahead:
                    return
                key, asked = self._ahead.popitem(last=False)
                if not evictable(key):
                    self._behind[key] = asked
                elif asked:
                    self._behind[key] = False
                else:
                    yielded.append(key)
                    yield key
        finally:
            for key in reversed(yielded):
                self._ahead[key] = False
                self._ahead.move_to_end(key, last=False)

    def evicted(self, key: str) -> None:
        half = self._half(key)
        if half is None:
            raise KeyError(key)
        del half[key]

    def _half(self, key: str) -> OrderedDict[str, bool] | None:
        if key in self._ahead:
            return self._ahead
        return self._behind if key in self._behind else None
