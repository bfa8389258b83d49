"""What a cache policy is: the order in which entries leave when room is needed, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol


class CachePolicy(Protocol):
    """Knows the keys that are whole in a cache. It holds no bytes, has no budget to keep, and evicts nothing itself."""

    def __len__(self) -> int: ...

    def added(self, key: str, size: int, cost: float) -> None:
        """``key`` is in the cache from now on: ``size`` bytes, and ``cost`` seconds to bring them again."""

    def touched(self, key: str) -> None:
        """``key`` was asked for while it was there. Keys that are not there don't count."""

    def victims(self, evictable: Callable[[str], bool]) -> Generator[str, None, None]:
        """The keys that are ``evictable``, each once, the one to go first first.

        To be asked for only when something will be evicted: what is passed over on the way counts as passed over. No
        other method is called until the iterator has ended or was closed. What it yielded and is not evicted then
        stays, and is the first to go the next time.
        """

    def evicted(self, key: str) -> None:
        """``key`` left to make room. Raises KeyError where it was not there."""
