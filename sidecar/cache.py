"""Which revisions' bytes the arena holds, what may not be evicted, and what goes first when room is needed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

from .extents import HEADER_BYTES, Allocator, Extent, block_bytes


class CachePolicy(Protocol):
    """Decides the order of eviction. ``cost`` is the seconds that bringing the bytes took, ``size`` is in bytes."""

    def added(self, key: str, size: int, cost: float) -> None: ...

    def touched(self, key: str) -> None: ...

    def removed(self, key: str) -> None: ...

    def order(self) -> Iterator[str]:
        """All keys, the one to evict first first. The cache is not changed while this is iterated."""


class Lru:
    """Least recently used first; size and cost don't count."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}

    def added(self, key: str, size: int, cost: float) -> None:
        self._keys[key] = None

    def touched(self, key: str) -> None:
        if key in self._keys:
            del self._keys[key]
            self._keys[key] = None

    def removed(self, key: str) -> None:
        self._keys.pop(key, None)

    def order(self) -> Iterator[str]:
        return iter(self._keys)


class Entry:
    """One revision in the arena. While it is not ``ready`` its bytes are being brought; ``overdue``: for too long."""

    __slots__ = ("extent", "overdue", "pins", "ready", "since")

    def __init__(self, extent: Extent, since: float) -> None:
        self.extent = extent
        self.since = since
        self.ready = False
        self.overdue = False
        self.pins: set[Hashable] = set()


class ArenaCache:
    """Byte-budgeted index of the arena, keyed by digest.

    A *pin* (of a load, an engine call or an unconfirmed install) keeps an entry absolutely. What a lease uses is kept
    as well, but may be given up for a load that has waited too long: the engine has its own copy of it.
    """

    def __init__(self, capacity: int, policy: CachePolicy) -> None:
        self._blocks = Allocator(capacity)
        self._policy = policy
        self._entries: dict[str, Entry] = {}
        self._generation = 0

    @property
    def capacity(self) -> int:
        return self._blocks.capacity

    @property
    def used(self) -> int:
        return self._blocks.used

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, digest: str) -> Entry | None:
        return self._entries.get(digest)

    def extent(self, digest: str) -> Extent:
        return self._entries[digest].extent

    def pinned(self, digest: str) -> bool:
        return bool(self._entries[digest].pins)

    def resident(self, digest: str) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and entry.ready

    def overdue(self, digest: str) -> bool:
        """Whether the bytes are on their way for so long that nobody should wait for them."""
        entry = self._entries.get(digest)
        return entry is not None and entry.overdue

    def fits(self, size: int) -> bool:
        """Whether an empty arena could hold ``size`` bytes."""
        return block_bytes(size) <= self.capacity

    def reserve(
        self, digest: str, size: int, now: float, keep: Callable[[str], bool]
    ) -> tuple[Extent, list[tuple[str, Extent]]] | None:
        """Make an extent for ``digest``, evicting what must go. None where what is pinned or kept leaves no room.

        Returns the extent and what was evicted for it. Nothing is evicted unless the room can be made.
        """
        need = block_bytes(size)
        evicted: list[tuple[str, Extent]] = []
        offset = self._blocks.allocate(need)
        if offset is None:
            victims = [key for key in self._policy.order() if not self._entries[key].pins and not keep(key)]
            if not self._room_without(victims, need):
                return None
            for victim in victims:
                evicted.append((victim, self.discard(victim)))
                offset = self._blocks.allocate(need)
                if offset is not None:
                    break
        if offset is None:
            raise RuntimeError("the arena's blocks and its index disagree")
        self._generation += 1
        extent = Extent(offset + HEADER_BYTES, size, self._generation)
        self._entries[digest] = Entry(extent, now)
        return extent, evicted

    def completed(self, digest: str, now: float) -> None:
        """The bytes are there and verified: from now on the entry can be installed, or evicted."""
        entry = self._entries[digest]
        entry.ready = True
        entry.overdue = False
        self._policy.added(digest, entry.extent.length, now - entry.since)

    def discard(self, digest: str) -> Extent:
        """Forget an entry and free its extent."""
        extent = self._entries.pop(digest).extent
        self._policy.removed(digest)
        self._blocks.free(extent.offset - HEADER_BYTES)
        return extent

    def touch(self, digest: str) -> None:
        self._policy.touched(digest)

    def pin(self, digest: str, owner: Hashable) -> None:
        self._entries[digest].pins.add(owner)

    def unpin(self, digest: str, owner: Hashable) -> None:
        """Take back a pin, if there is one."""
        entry = self._entries.get(digest)
        if entry is not None:
            entry.pins.discard(owner)

    def _room_without(self, victims: list[str], need: int) -> bool:
        """Whether evicting ``victims`` would leave a run of at least ``need`` free bytes."""
        starts = {self._entries[digest].extent.offset - HEADER_BYTES for digest in victims}
        kept = [(at, length) for at, length in self._blocks.blocks() if at not in starts]
        edge = 0
        for at, length in kept:
            if at - edge >= need:
                return True
            edge = at + length
        return self.capacity - edge >= need
