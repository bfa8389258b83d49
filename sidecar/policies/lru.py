"""Least recently used: the baseline that the others are measured against."""

from __future__ import annotations

from collections.abc import Callable, Generator


class Lru:
    """Size and cost don't count."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def added(self, key: str, size: int, cost: float) -> None:
        self._keys[key] = None

    def touched(self, key: str) -> None:
        if key in self._keys:
            del self._keys[key]
            self._keys[key] = None

    def victims(self, evictable: Callable[[str], bool]) -> Generator[str, None, None]:
        return (key for key in self._keys if evictable(key))

    def evicted(self, key: str) -> None:
        del self._keys[key]
