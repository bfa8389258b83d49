"""The arena's memory: one shared segment of the host, mapped once by us and by engines that can.

An extent's data has a record of HEADER_BYTES before it (``backends.extent_record``). It is written when the data is
whole and zeroed before the room is given away, so that whoever maps the segment can check, before and after a copy,
that it copied what was meant. The file is made by hand: ``multiprocessing.shared_memory`` has a tracker that
unlinks a segment when the process that made it is killed, under the eyes of engines that have it mapped.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from blake3 import blake3

from backends import extent_record
from wire.outcomes import ArtifactUnavailable, StorageFull

from .extents import HEADER_BYTES, Extent

_ROOT = extent_record.SEGMENTS


def segment_name(node: str, run_dir: str) -> str:
    """The same for every life of a node's sidecar, and another for every other deployment of the host."""
    return f"roost-{node}-{blake3(os.fsencode(Path(run_dir).absolute())).hexdigest()[:12]}"


def unlink_left(node: str, run_dir: str, *, root: Path = _ROOT) -> bool:
    """Remove the segment that a killed sidecar left. Returns whether there was one. Nobody may serve the node now."""
    path = root / segment_name(node, run_dir)
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


class SegmentLost(OSError):
    """The segment's name stands for another file than the one that is mapped, or for a shorter or longer one."""


class Arena:
    """A fresh segment of ``size`` bytes. What an earlier life left under the name is unlinked, never trusted.

    Memory is taken from the host when an extent is first written, or at once where an engine on CUDA pins the arena.
    Raises StorageFull where not even the file can be made.
    """

    def __init__(self, segment: str, size: int, *, root: Path = _ROOT) -> None:
        self.segment = segment
        self.path = root / segment
        self.path.unlink(missing_ok=True)
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._file, size)
        except OSError as error:
            raise StorageFull(f"no arena of {size} bytes at {self.path}: {error.strerror}") from error
        self._made = _identity(os.fstat(self._file))
        self._map = mmap.mmap(self._file, size)
        self._view = memoryview(self._map)

    def check(self) -> None:
        """Raises SegmentLost where an engine that maps the segment by its name would not find our bytes there."""
        try:
            found = _identity(self.path.lstat())
        except OSError as error:
            raise SegmentLost(f"the arena's segment {self.path} is gone: {error.strerror}") from error
        if found != self._made:
            raise SegmentLost(f"the arena's segment {self.path} was replaced, truncated or extended by somebody else")

    def begin(self, extent: Extent) -> memoryview:
        """The extent's bytes, to be written. Raises StorageFull where the host has no memory for them.

        Without the reservation a full host would end this process by SIGBUS at the first write.
        """
        start = extent.offset - HEADER_BYTES
        try:
            os.posix_fallocate(self._file, start, HEADER_BYTES + extent.length)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise StorageFull(f"the host has no memory for {extent.length} bytes more of the arena") from error
        self.clear(extent)
        return self._data(extent)

    def seal(self, extent: Extent, digest: str) -> None:
        """The extent is whole: write its record."""
        extent_record.write(
            self._view, extent.offset, generation=extent.generation, length=extent.length, digest=digest
        )

    def read(self, extent: Extent) -> memoryview:
        """The extent's bytes, read-only. Raises ArtifactUnavailable where it was given away meanwhile."""
        named = extent_record.matches(
            self._view, extent.offset, generation=extent.generation, length=extent.length, digest=None
        )
        if not named:
            raise ArtifactUnavailable(f"extent {extent.generation} of the arena was given away")
        return self._data(extent).toreadonly()

    def clear(self, extent: Extent) -> None:
        """The extent is given away: nobody may take its bytes for what they were."""
        start = extent.offset - HEADER_BYTES
        self._map[start : start + HEADER_BYTES] = bytes(HEADER_BYTES)

    def close(self) -> None:
        """Unlink the segment. Its memory is free when nobody has it mapped any more."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            # somebody still holds a view of an extent: the mapping goes with the last of them
            return

    def _data(self, extent: Extent) -> memoryview:
        return self._view[extent.offset : extent.offset + extent.length]


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return (status.st_dev, status.st_ino, status.st_size)
