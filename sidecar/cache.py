"""Which revisions' bytes the arena holds, what may not be evicted, and what goes first when room is needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import closing

from wire.peers import Peer

from .extents import HEADER_BYTES, Allocator, Clearing, Extent, block_bytes
from .policies.interface import CachePolicy


class Entry:
    """One revision in the arena. While it is not ``ready`` its bytes are being brought; ``overdue``: for too long.

    ``pulled``: they come from a trainer; ``peers``: other nodes are asked for them.
    """

    __slots__ = ("extent", "overdue", "peers", "pins", "pulled", "ready", "since")

    def __init__(self, extent: Extent, since: float) -> None:
        self.extent = extent
        self.since = since
        self.ready = False
        self.overdue = False
        self.pulled = False
        self.peers: tuple[Peer, ...] = ()
        self.pins: set[Hashable] = set()


class ArenaCache:
    """Byte-budgeted index of the arena, keyed by digest.

    A *pin* (of a load, an engine call or an unconfirmed install) keeps an entry absolutely. What a lease uses is kept
    as well, but may be given up for a load that has waited too long: the engine has its own copy of it.
    """

    def __init__(self, capacity: int, policy: CachePolicy) -> None:
        self._blocks = Allocator(capacity)
        self.policy = policy
        self._entries: dict[str, Entry] = {}
        # what is pinned, or not there yet
        self._held: set[str] = set()
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
        self, digest: str, size: int, now: float, keep: Callable[[str], bool] | None = None
    ) -> tuple[Extent, list[tuple[str, Extent]]] | None:
        """Make an extent for ``digest``, evicting what must go. None where what is pinned or kept leaves no room.

        Returns the extent and what was evicted for it. Nothing is evicted unless the room can be made, and nothing
        that does not lie where it is made.
        """
        need = block_bytes(size)
        evicted: list[tuple[str, Extent]] = []
        offset = self._blocks.allocate(need)
        if offset is None:
            spared = self._held if keep is None else self._held.union(filter(keep, self._entries))
            if not self._room_beside(spared, need):
                return None
            offset, victims = self._make_room(need, spared)
            for key in victims:
                evicted.append((key, self._entries.pop(key).extent))
                self.policy.evicted(key)
        self._generation += 1
        extent = Extent(offset + HEADER_BYTES, size, self._generation)
        self._entries[digest] = Entry(extent, now)
        self._held.add(digest)
        return extent, evicted

    def mark_pulled(self, key: str) -> None:
        """The bytes of ``key``, which is no digest yet, come from a trainer."""
        self._entries[key].pulled = True

    def ask(self, digest: str, peers: tuple[Peer, ...]) -> None:
        """The bytes of ``digest`` are on their way from ``peers``, if those have them."""
        self._entries[digest].peers = peers

    def rename(self, key: str, digest: str) -> None:
        """What ``key`` stood for has a digest now, which is not known here yet."""
        if digest in self._entries:
            raise RuntimeError(f"{digest} has an extent already")
        self._entries[digest] = self._entries.pop(key)
        self._held.remove(key)
        self._held.add(digest)

    def completed(self, digest: str, now: float) -> None:
        """The bytes are there and verified: from now on the entry can be installed, or evicted."""
        entry = self._entries[digest]
        entry.ready = True
        entry.overdue = False
        if not entry.pins:
            self._held.discard(digest)
        self.policy.added(digest, entry.extent.length, now - entry.since)

    def discard(self, digest: str) -> None:
        """Forget an entry that never became ready, and free its extent."""
        extent = self._entries.pop(digest).extent
        self._held.discard(digest)
        self._blocks.free(extent.offset - HEADER_BYTES)

    def touch(self, digest: str) -> None:
        self.policy.touched(digest)

    def pin(self, digest: str, owner: Hashable) -> None:
        self._entries[digest].pins.add(owner)
        self._held.add(digest)

    def unpin(self, digest: str, owner: Hashable) -> None:
        """Take back a pin, if there is one."""
        entry = self._entries.get(digest)
        if entry is not None:
            entry.pins.discard(owner)
            if entry.ready and not entry.pins:
                self._held.discard(digest)

    def _room_beside(self, spared: Collection[str], need: int) -> bool:
        """Whether an arena with nothing but ``spared`` would have a run of at least ``need`` free bytes."""
        edge = 0
        for at in sorted(self._entries[digest].extent.offset - HEADER_BYTES for digest in spared):
            if at - edge >= need:
                return True
            edge = at + self._blocks.length(at)
        return self.capacity - edge >= need

    def _make_room(self, need: int, spared: Collection[str]) -> tuple[int, list[str]]:
        """Allocate ``need`` bytes where the policy's victims, taken in its order, first leave a run of them.

        Returns the offset, and whose blocks were there. Other victims stay.
        """
        clearing = Clearing(self._blocks)
        keys: dict[int, str] = {}
        with closing(self.policy.victims(lambda key: key not in spared)) as victims:
            for key in victims:
                at = self._entries[key].extent.offset - HEADER_BYTES
                keys[at] = key
                start, length = clearing.clear(at)
                if length >= need:
                    offset, cleared = clearing.cheapest(start, length, need)
                    self._blocks.replace(cleared, offset, need)
                    return offset, [keys[block] for block in cleared]
        raise RuntimeError("the cache's policy and its index disagree")
