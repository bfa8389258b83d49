"""Memory of failures: what failed is not tried again for a while, longer each time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import msgspec

Key = TypeVar("Key", bound=Hashable)

# a bound on memory, not on time: the oldest memory goes first
MAX_REMEMBERED = 4096


class Failure(msgspec.Struct):
    """``times`` failures in a row, the last at ``at``; no new try before ``until``."""

    times: int
    at: float
    until: float
    message: str


class NegativeCache(Generic[Key]):
    """Failures by what failed: ``first_s`` after the first one, doubling to ``max_s``."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._failures: dict[Key, Failure] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._failures

    def __iter__(self) -> Iterator[Key]:
        return iter(self._failures)

    def remember(self, key: Key, message: str, now: float) -> None:
        before = self._failures.pop(key, None)
        times = before.times + 1 if before else 1
        # 2 ** 32 seconds are past any bound that makes sense, and the exponent must not grow for ever
        pause = min(self._first_s * 2.0 ** min(times - 1, 32), self._max_s)
        self._failures[key] = Failure(times, now, now + pause, message)
        if len(self._failures) > MAX_REMEMBERED:
            del self._failures[next(iter(self._failures))]

    def blocked(self, key: Key, now: float) -> Failure | None:
        """The failure that forbids trying now, if any."""
        failure = self._failures.get(key)
        return failure if failure is not None and failure.until > now else None

    def forgive(self, key: Key) -> None:
        """It worked: the next failure is a first one again."""
        self._failures.pop(key, None)

    def forget_old(self, now: float) -> list[Key]:
        """Drop what has been free to try for as long as the longest pause; returns what it was."""
        old = [key for key, failure in self._failures.items() if now - failure.until > self._max_s]
        for key in old:
            del self._failures[key]
        return old
