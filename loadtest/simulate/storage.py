"""Models of what holds bytes: the artifact store, and the arena, whose extents hold a digest in place of bytes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from sidecar.extents import Extent
from sidecar.sources import Source
from wire.outcomes import ArtifactUnavailable, DeadlinePassed

from .constants import EngineConstants


class Faults(msgspec.Struct):
    """How often a fetch fails, and how often it hangs past its bound: shares of 1."""

    failing: float = 0.0
    hanging: float = 0.0


class ArtifactStore:
    """What every node fetches from. ``fetched`` counts fetches by digest, ``fetched_bytes`` their bytes."""

    def __init__(self, constants: EngineConstants, chance: random.Random) -> None:
        self._constants = constants
        self._chance = chance
        self.faults = Faults()
        self.fetched: Counter[str] = Counter()
        self.fetched_bytes = 0

    async def read(self, digest: str, size: int, timeout_s: float) -> None:
        """Takes as long as it takes. Raises ArtifactUnavailable; hangs for longer than ``timeout_s`` at times.

        Cancelled, it ends at once, unless it hangs.
        """
        constants = self._constants
        drawn = self._chance.random()
        if drawn < self.faults.hanging:
            await _hang(timeout_s * 1.5)
        await asyncio.sleep(constants.fetch_s + size * constants.fetch_byte_s)
        if self.faults.hanging <= drawn < self.faults.hanging + self.faults.failing:
            raise ArtifactUnavailable(f"artifact {digest} could not be read")
        self.fetched[digest] += 1
        self.fetched_bytes += size


async def _hang(seconds: float) -> None:
    """Storage that does not answer lets nobody go, whoever wants to."""
    hanging = asyncio.ensure_future(asyncio.sleep(seconds))
    try:
        await asyncio.wait([hanging])
    except asyncio.CancelledError:
        await asyncio.wait([hanging])
        raise


class MemoryArena:
    """As ``sidecar.arena.Arena``. What breaks its rules is written down in ``broken``."""

    def __init__(self, segment: str, size: int) -> None:
        self.segment = segment
        self.size = size
        self.broken: list[str] = []
        self._extents: dict[int, Extent] = {}
        self._sealed: dict[int, str] = {}

    def check(self) -> None:
        """Nobody else can reach it."""

    def begin(self, extent: Extent) -> None:
        """``extent`` is about to be written."""
        for other in self._extents.values():
            apart = extent.offset + extent.length <= other.offset or other.offset + other.length <= extent.offset
            if not apart and other.offset in self._sealed:
                self.broken.append(f"extent {extent.generation} is written over {other.generation}, not cleared")
        if extent.offset + extent.length > self.size:
            self.broken.append(f"extent {extent.generation} ends past the arena")
        self._extents = {
            at: other
            for at, other in self._extents.items()
            if extent.offset + extent.length <= at or at + other.length <= extent.offset
        }
        self._extents[extent.offset] = extent
        self._sealed.pop(extent.offset, None)

    def seal(self, extent: Extent, digest: str) -> None:
        if self._extents.get(extent.offset) != extent:
            self.broken.append(f"extent {extent.generation} was given away while it was written")
        else:
            self._sealed[extent.offset] = digest

    def read(self, extent: Extent) -> memoryview:
        """The digest of what the extent holds. Raises ArtifactUnavailable where it was given away meanwhile."""
        digest = self._sealed.get(extent.offset)
        if digest is None or self._extents[extent.offset] != extent:
            raise ArtifactUnavailable(f"extent {extent.generation} of the arena was given away")
        return memoryview(digest.encode())

    def clear(self, extent: Extent) -> None:
        self._sealed.pop(extent.offset, None)
        self._extents.pop(extent.offset, None)

    def holds(self, extent: Extent) -> str | None:
        """The digest that was sealed there, if the extent is still the same."""
        return self._sealed.get(extent.offset) if self._extents.get(extent.offset) == extent else None

    def close(self) -> None:
        self._extents.clear()
        self._sealed.clear()


class MemoryMark:
    """As ``sidecar.cordon.CordonFile``: what a node's disk remembers over the lives of its sidecar."""

    def __init__(self) -> None:
        self._on = False

    def is_set(self) -> bool:
        return self._on

    def set(self, *, on: bool) -> None:
        self._on = on


class MemoryFetcher:
    """As ``sidecar.fetch.Fetcher``."""

    def __init__(self, store: ArtifactStore, arena: MemoryArena, *, timeout_s: float) -> None:
        self._store = store
        self._arena = arena
        self._timeout_s = timeout_s

    async def fetch(
        self, digest: str, extent: Extent, on_overdue: Callable[[str], None], others: Iterable[Source] = ()
    ) -> Source | None:
        self._arena.begin(extent)
        late = f"artifact {digest} did not come within {self._timeout_s:g} s"
        given_up = False

        def give_up() -> None:
            nonlocal given_up
            given_up = True
            on_overdue(late)

        timer = asyncio.get_running_loop().call_later(self._timeout_s, give_up)
        try:
            await self._store.read(digest, extent.length, self._timeout_s)
        finally:
            timer.cancel()
        if given_up:
            raise DeadlinePassed(late)
        self._arena.seal(extent, digest)
        return None

    def close(self) -> None:
        """Nothing is kept."""
