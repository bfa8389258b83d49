"""From the store, or from nearer, into the arena; verified on arrival."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from catalog.artifacts import ArtifactSource, ArtifactStore
from wire.outcomes import ArtifactUnavailable, DeadlinePassed

from .arena import Arena
from .extents import Extent
from .sources import Source

_log = logging.getLogger(__name__)

# threads that storage may keep for good before fetches have to wait for one another
_MAX_HANGING = 64


class Fetcher:
    """Fetches in threads, at most ``workers`` at once and as many more as hang in storage that does not answer.

    ``nearer`` sources are asked first, in their order, and closed with it. One that keeps a fetch past its time-out is
    not asked again before it lets go of it.
    """

    def __init__(
        self, store: ArtifactStore, arena: Arena, *, workers: int, timeout_s: float, nearer: Sequence[Source] = ()
    ) -> None:
        self._store = store
        self._arena = arena
        self._nearer = nearer
        self._timeout_s = timeout_s
        # by digest, the nearer source that its fetch reads from now, and that of fetches past their time-out
        self._reading: dict[str, Source] = {}
        self._hanging: dict[str, Source] = {}
        self._threads = ThreadPoolExecutor(workers + _MAX_HANGING, thread_name_prefix="fetch")

    async def fetch(
        self, digest: str, extent: Extent, on_overdue: Callable[[str], None], others: Iterable[Source] = ()
    ) -> Source | None:
        """Fill ``extent`` with the bytes of ``digest``; the source that had them, None for the store.

        ``others`` are asked as well, after what is nearer, and gone through on a thread. However this ends, nobody
        writes there afterwards.

        So it ends only with the thread that writes: past the time-out ``on_overdue`` is called, with what to tell.
        Cancelled, it gives up as soon as that thread can, which may be past the time-out as well.

        Raises ArtifactUnavailable (missing, of another size, not of its digest), StorageFull, DeadlinePassed.
        """
        given_up = threading.Event()
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, self._fill, digest, extent, others, given_up)
        timer = loop.call_later(self._timeout_s, self._overdue, digest, given_up, on_overdue)
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            given_up.set()
            await asyncio.wait([work])
            # what it says of being given up is for nobody
            work.exception()
            raise
        finally:
            timer.cancel()
            self._hanging.pop(digest, None)
        return work.result()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for source in self._nearer:
            source.close()

    def _overdue(self, digest: str, given_up: threading.Event, on_overdue: Callable[[str], None]) -> None:
        given_up.set()
        source = self._reading.get(digest)
        if source is not None:
            self._hanging[digest] = source
        on_overdue(self._too_late(digest))

    def _fill(self, digest: str, extent: Extent, others: Iterable[Source], given_up: threading.Event) -> Source | None:
        found = self._fill_from_one(chain(self._nearer, others), digest, extent, given_up)
        if found is None:
            self._fill_from_store(digest, extent, given_up)
        self._arena.seal(extent, digest)
        for source in self._nearer:
            if source is not found:
                source.arrived(digest, extent)
        return found

    def _fill_from_one(
        self, sources: Iterable[Source], digest: str, extent: Extent, given_up: threading.Event
    ) -> Source | None:
        """The source that had it. What goes wrong is told and passed over: the store has the last word."""
        for source in sources:
            if source in list(self._hanging.values()):
                continue
            self._reading[digest] = source
            try:
                with source.open(digest) as found:
                    if found is None:
                        continue
                    if found.size == extent.length and self._read(found, digest, extent, given_up) == digest:
                        return source
            except ArtifactUnavailable as error:
                _log.warning("%s: %s", source.name, error.message)
            else:
                _log.warning("what the %s has as artifact %s is something else", source.name, digest)
            finally:
                del self._reading[digest]
            source.distrust(digest)
        return None

    def _fill_from_store(self, digest: str, extent: Extent, given_up: threading.Event) -> None:
        with self._store.open(digest) as source:
            if source.size != extent.length:
                raise ArtifactUnavailable(
                    f"artifact {digest} has {source.size} bytes in the store, not {extent.length}"
                )
            found = self._read(source, digest, extent, given_up)
        if found != digest:
            raise ArtifactUnavailable(f"artifact {digest} is corrupt in the store: its bytes have digest {found}")

    def _read(self, source: ArtifactSource, digest: str, extent: Extent, given_up: threading.Event) -> str:
        """Into the extent; the digest of what is there then."""
        with self._arena.begin(extent) as view:
            found = source.fill(view, given_up.is_set)
        if found is None:
            raise DeadlinePassed(self._too_late(digest))
        return found

    def _too_late(self, digest: str) -> str:
        return f"artifact {digest} did not come within {self._timeout_s:g} s"
