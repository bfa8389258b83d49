"""Memory of failures: what failed is not tried again for a while, longer each time."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from backends.interface import EngineLimits

# a bound on memory, not on time: the oldest memory goes first
MAX_REMEMBERED = 4096


class Failure(msgspec.Struct):
    """``times`` failures in a row, the last at ``at``; no new try before ``until``."""

    times: int
    at: float
    until: float
    message: str


class NegativeCache:
    """Failures by digest: ``first_s`` after the first one, doubling to ``max_s``."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._failures: dict[str, Failure] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self._failures

    def __iter__(self) -> Iterator[str]:
        return iter(self._failures)

    def remember(self, digest: str, message: str, now: float) -> None:
        before = self._failures.pop(digest, None)
        times = before.times + 1 if before else 1
        # 2 ** 32 seconds are past any bound that makes sense, and the exponent must not grow for ever
        pause = min(self._first_s * 2.0 ** min(times - 1, 32), self._max_s)
        self._failures[digest] = Failure(times, now, now + pause, message)
        if len(self._failures) > MAX_REMEMBERED:
            del self._failures[next(iter(self._failures))]

    def blocked(self, digest: str, now: float) -> Failure | None:
        """The failure that forbids trying now, if any."""
        failure = self._failures.get(digest)
        return failure if failure is not None and failure.until > now else None

    def forgive(self, digest: str) -> None:
        """It worked: the next failure is a first one again."""
        self._failures.pop(digest, None)

    def forget_old(self, now: float) -> list[str]:
        """Drop what has been free to try for as long as the longest pause; returns the digests."""
        old = [digest for digest, failure in self._failures.items() if now - failure.until > self._max_s]
        for digest in old:
            del self._failures[digest]
        return old


class UnfitMemory:
    """Adapters that an engine of certain limits refused: it, and any engine like it, will refuse them again."""

    def __init__(self) -> None:
        self._messages: dict[tuple[str, EngineLimits], str] = {}

    def remember(self, digest: str, limits: EngineLimits, message: str) -> None:
        self._messages[digest, limits] = message
        if len(self._messages) > MAX_REMEMBERED:
            del self._messages[next(iter(self._messages))]

    def why(self, digest: str, limits: EngineLimits) -> str | None:
        return self._messages.get((digest, limits))
