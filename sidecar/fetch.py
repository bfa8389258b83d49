"""From the store into the arena, verified on arrival."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from catalog.artifacts import ArtifactStore
from wire.outcomes import ArtifactUnavailable, DeadlinePassed

from .arena import Arena
from .extents import Extent

# threads that storage may keep for good before fetches have to wait for one another
_MAX_HANGING = 64


class Fetcher:
    """Fetches in threads, at most ``workers`` at once and as many more as hang in storage that does not answer."""

    def __init__(self, store: ArtifactStore, arena: Arena, *, workers: int, timeout_s: float) -> None:
        self._store = store
        self._arena = arena
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(workers + _MAX_HANGING, thread_name_prefix="fetch")

    async def fetch(self, digest: str, extent: Extent, on_overdue: Callable[[str], None]) -> None:
        """Fill ``extent`` with the bytes of ``digest``. However this ends, nobody writes there afterwards.

        So it ends only with the thread that writes: past the time-out ``on_overdue`` is called, with what to tell.

        Raises ArtifactUnavailable (missing, of another size, not of its digest), StorageFull, DeadlinePassed.
        """
        given_up = threading.Event()
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._fill, digest, extent, given_up)
        try:
            done, _ = await asyncio.wait([work], timeout=self._timeout_s)
        except asyncio.CancelledError:
            given_up.set()
            await asyncio.wait([work])
            raise
        if not done:
            given_up.set()
            on_overdue(self._too_late(digest))
        await work

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _fill(self, digest: str, extent: Extent, given_up: threading.Event) -> None:
        with self._store.open(digest) as source:
            if source.size != extent.length:
                raise ArtifactUnavailable(
                    f"artifact {digest} has {source.size} bytes in the store, not {extent.length}"
                )
            with self._arena.begin(extent) as view:
                found = source.fill(view, given_up.is_set)
        if found is None:
            raise DeadlinePassed(self._too_late(digest))
        if found != digest:
            raise ArtifactUnavailable(f"artifact {digest} is corrupt in the store: its bytes have digest {found}")
        self._arena.seal(extent, digest)

    def _too_late(self, digest: str) -> str:
        return f"artifact {digest} did not come within {self._timeout_s:g} s"
