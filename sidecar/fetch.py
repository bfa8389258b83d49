"""From the store's folder into the arena, verified on arrival."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from blake3 import blake3

from catalog.blobs import BlobStore
from wire.outcomes import ArtifactUnavailable, DeadlinePassed, RoostError

from .arena import Arena
from .extents import Extent

# large enough for a disk, small enough to notice soon that the fetch was given up
_CHUNK_BYTES = 4 << 20
# threads that storage may keep for good before fetches have to wait for one another
_MAX_HANGING = 64


class Fetcher:
    """Fetches in threads, at most ``workers`` at once and as many more as hang in storage that does not answer."""

    def __init__(self, store: BlobStore, arena: Arena, *, workers: int, timeout_s: float) -> None:
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
        path = self._store.path(digest)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ArtifactUnavailable(f"artifact {digest} can't be read: {error.strerror}") from error
        try:
            size = os.fstat(file).st_size
            if size != extent.length:
                raise ArtifactUnavailable(f"artifact {digest} has {size} bytes in the store, not {extent.length}")
            with self._arena.begin(extent) as view:
                found = _copy(file, view, given_up)
        except RoostError:
            # some of ours are OSErrors too, and say more than this one would
            raise
        except OSError as error:
            raise ArtifactUnavailable(f"artifact {digest} can't be read: {error.strerror}") from error
        finally:
            os.close(file)
        if found is None:
            raise DeadlinePassed(self._too_late(digest))
        if found != digest:
            raise ArtifactUnavailable(f"artifact {digest} is corrupt in the store: its bytes have digest {found}")
        self._arena.seal(extent, digest)

    def _too_late(self, digest: str) -> str:
        return f"artifact {digest} did not come within {self._timeout_s:g} s"


def _copy(file: int, view: memoryview, given_up: threading.Event) -> str | None:
    """Copy all of ``file`` into ``view``; the digest of what is in the arena then, or None if it was given up."""
    hasher = blake3()
    at = 0
    while at < len(view):
        if given_up.is_set():
            return None
        with view[at : at + _CHUNK_BYTES] as rest:
            count = os.readv(file, [rest])
        if count == 0:
            # it shrank: the digest will tell
            break
        with view[at : at + count] as arrived:
            hasher.update(arrived)
        at += count
    return hasher.hexdigest()
