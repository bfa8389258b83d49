"""The disk tier: copies of revision files on this host's disk, for a store that is far away.

A copy is written behind the fetch that brought its bytes, out of the arena, and never while anybody waits for it. It
is fsynced before it has its name, and verified by digest when it is written and again, in the arena, whenever it is
read, so that whatever a crash or a disk leaves costs a fetch and nothing else. A disk that is full or broken makes
the tier keep nothing new for a while; it never makes a load fail.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from catalog.artifacts import ArtifactSource
from catalog.blobs import BlobStore
from wire.outcomes import ArtifactUnavailable, InvalidRequest, RoostError

from .arena import Arena
from .copies import Copies
from .extents import Extent
from .policies import CachePolicy

_log = logging.getLogger(__name__)

# copies that wait to be written: what waits longer would be evicted from the arena before its turn
_MAX_PENDING = 64
_WRITE_BYTES = 4 << 20
# after the disk refused a copy
_PAUSE_S = 60.0
# of the file system: what is left to others, the catalog's journal among them
_FREE_SHARE = 0.05


class DiskTier:
    """At most ``budget`` bytes of files under ``root``, which is nobody else's. A ``Source`` of fetches.

    ``now`` is a monotonic clock in seconds. Raises InvalidRequest where another process has the folder, and
    ArtifactUnavailable, StorageFull or OSError where it can't be made or read.
    """

    name = "disk"

    def __init__(
        self,
        root: Path,
        budget: int,
        arena: Arena,
        policy: CachePolicy,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root
        self._arena = arena
        self._now = now
        self._blobs = BlobStore(root)
        # guards what follows, and is never held while the disk is waited for
        self._lock = threading.Lock()
        self._copies = Copies(budget, policy)
        self._pending: set[str] = set()
        self._closing = False
        self._paused_until: float | None = None
        self._claim = _claim(root)
        try:
            self._adopt()
        except BaseException:
            os.close(self._claim)
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="disk-tier")

    @property
    def used(self) -> int:
        """Bytes of all copies, that of the one being written included."""
        return self._copies.used

    def __contains__(self, digest: str) -> bool:
        with self._lock:
            return digest in self._copies

    @contextlib.contextmanager
    def open(self, digest: str) -> Iterator[ArtifactSource | None]:
        with contextlib.ExitStack() as opened:
            yield self._opened(digest, opened)

    def distrust(self, digest: str) -> None:
        with self._lock:
            here = self._copies.forget(digest)
        if here:
            with contextlib.suppress(ArtifactUnavailable):
                self._blobs.remove(digest)

    def arrived(self, digest: str, extent: Extent) -> None:
        with self._lock:
            known = digest in self._copies or digest in self._pending
            hopeless = self._closing or extent.length > self._copies.budget or len(self._pending) >= _MAX_PENDING
            if known or hopeless:
                return
            self._pending.add(digest)
            self._thread.submit(self._keep, digest, extent)

    def descriptor(self, digest: str) -> int | None:
        """An open file with the copy, the caller's to read and to close; None where there is none."""
        with self._lock:
            if digest not in self._copies:
                return None
            self._copies.touch(digest)
        try:
            return os.open(self._blobs.path(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            # it left for another one just now
            return None

    def drop(self, digest: str) -> None:
        """Nobody is to have ``digest`` any more. Returns at once; not to be called once ``close`` was."""
        self._thread.submit(self.distrust, digest)

    def wait(self) -> None:
        """Until what has arrived so far was written or given up."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """A copy that is being written is given up."""
        with self._lock:
            self._closing = True
        self._thread.shutdown(cancel_futures=True)
        os.close(self._claim)

    def _opened(self, digest: str, opened: contextlib.ExitStack) -> ArtifactSource | None:
        """The copy, if there is one, for as long as ``opened`` lasts."""
        with self._lock:
            here = digest in self._copies
            self._copies.touch(digest)
        if not here:
            return None
        try:
            source = opened.enter_context(self._blobs.open(digest))
        except ArtifactUnavailable:
            if digest in self:
                raise
            # it left for another one just now
            return None
        # so that the next life of this sidecar knows what was used last
        with contextlib.suppress(OSError):
            os.utime(self._blobs.path(digest))
        return source

    def _adopt(self) -> None:
        """Know what an earlier life left, the least recently used first. What it was writing, or has no room, goes."""
        self._blobs.sweep(_no_orphans, 0.0)
        for found in self._blobs.stored():
            if found.size > self._copies.budget:
                self._blobs.remove(found.digest)
                continue
            for leaving in self._copies.reserve(found.size):
                self._blobs.remove(leaving)
            self._copies.settle(found.digest, found.size, kept=True)

    # on the writing thread

    def _keep(self, digest: str, extent: Extent) -> None:
        try:
            if self._paused_until is None or self._now() >= self._paused_until:
                self._write(digest, extent)
        except (RoostError, OSError) as error:
            self._pause(error)
        except Exception:
            _log.exception("artifact %s was not kept on disk", digest)
        finally:
            with self._lock:
                self._pending.discard(digest)

    def _write(self, digest: str, extent: Extent) -> None:
        try:
            view = self._arena.read(extent)
        except ArtifactUnavailable:
            # it was evicted before its turn came
            return
        with view:
            shortage = extent.length - _spare_bytes(self._root)
            with self._lock:
                leaving = self._copies.reserve(extent.length, shortage=shortage)
            kept = False
            try:
                for other in list(leaving):
                    self._blobs.remove(other)
                    del leaving[other]
                kept = self._copy(digest, view)
            finally:
                with self._lock:
                    self._copies.settle(digest, extent.length, kept=kept)
                    for other, size in leaving.items():
                        self._copies.put_back(other, size)
        if kept and self._paused_until is not None:
            self._paused_until = None
            _log.info("revisions are kept in %s again", self._root)

    def _copy(self, digest: str, view: memoryview) -> bool:
        """False where the extent was given away meanwhile, or the tier is closing."""
        with self._blobs.writer(digest) as writer:
            for start in range(0, len(view), _WRITE_BYTES):
                if self._closing:
                    return False
                with view[start : start + _WRITE_BYTES] as part:
                    writer.write(part)
            try:
                writer.commit()
            except ArtifactUnavailable as error:
                if error.field == "digest":
                    return False
                raise
        return True

    def _pause(self, error: RoostError | OSError) -> None:
        # told once for as long as it lasts
        tell = _log.warning if self._paused_until is None else _log.debug
        tell("no revisions are kept in %s for now: %s", self._root, error)
        self._paused_until = self._now() + _PAUSE_S


def open_tier(root: Path, budget: int, arena: Arena, policy: CachePolicy) -> DiskTier | None:
    """The tier in ``root``; None, and a warning, where there can't be one."""
    try:
        return DiskTier(root, budget, arena, policy)
    except (RoostError, OSError) as error:
        _log.warning("no revisions are kept in %s: %s", root, error)
        return None


def _claim(root: Path) -> int:
    """Hold the folder for as long as the descriptor is open, whichever way this process ends."""
    file = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise InvalidRequest(f"another process has {root}: {error.strerror}", field="disk_dir") from error
    return file


def _spare_bytes(root: Path) -> int:
    """How many bytes more the file system can take before what is left to others is touched."""
    found = os.statvfs(root)
    return found.f_frsize * (found.f_bavail - int(found.f_blocks * _FREE_SHARE))


@contextlib.contextmanager
def _no_orphans(digests: Sequence[str]) -> Iterator[frozenset[str]]:
    """What a sweep may remove of what is complete: nothing."""
    yield frozenset()
