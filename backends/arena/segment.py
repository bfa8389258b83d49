"""The arena's segment as an engine sees it: mapped once, shared and read-only, and checked extent by extent."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from backends import extent_record
from backends.extent_path import ExtentPath


class StaleExtent(RuntimeError):
    """The extent was given away, or never held what the path says."""


class OutOfReach(RuntimeError):
    """This process will not map the segment: it isn't there, or is not ours to read."""


class MappingUser(Protocol):
    """Who is told of a worker's mappings; all calls come from its main thread."""

    def mapped(self, segment: memoryview) -> None:
        """A segment's read-only mapping, page-aligned, that sources will lie in: a chance to register it as pinned.

        It stays where it is until ``unmapped``. Must not raise where registering fails: such sources are then copied
        another way.
        """

    def unmapped(self, segment: memoryview, close: Callable[[], None]) -> None:
        """Forget the mapping; ``close`` it, on any thread, when nothing reads it any more. Must not raise."""


class Segment:
    """One mapping. A segment that is made anew under its name is another file: ``current`` says so."""

    def __init__(self, path: Path) -> None:
        """Raises OutOfReach, and OSError or RuntimeError for what may pass."""
        self._path = path
        try:
            # without waiting: what lies there may be a pipe
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, PermissionError) as error:
            raise OutOfReach(f"segment {path}: {error.strerror}") from error
        try:
            found = os.fstat(file)
            if found.st_uid != os.geteuid():
                raise OutOfReach(f"segment {path} belongs to another user")
            if not stat.S_ISREG(found.st_mode) or not found.st_size:
                raise RuntimeError(f"segment {path} is no file with bytes in it")
            self._file = (found.st_dev, found.st_ino)
            # shared: a private mapping that is populated would copy the whole arena
            self._map = mmap.mmap(file, found.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(file)
        self.view = memoryview(self._map)

    def current(self) -> bool:
        """Whether the name still stands for the file that is mapped."""
        try:
            found = self._path.lstat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._file

    def check(self, extent: ExtentPath) -> None:
        """Raises StaleExtent unless the bytes there are the extent's now.

        Call it again after a copy: what was copied is the extent's only if it was so before and after.
        """
        if not self.current():
            raise StaleExtent(f"segment {extent.segment} was given up")
        if extent.offset + extent.length > self.view.nbytes:
            raise StaleExtent(
                f"offset {extent.offset} and length {extent.length} reach beyond the segment's {self.view.nbytes} bytes"
            )
        named = extent_record.matches(
            self.view, extent.offset, generation=extent.generation, length=extent.length, digest=extent.digest
        )
        if not named:
            raise StaleExtent(f"extent {extent.generation} of {extent.segment} was given away")

    def data(self, extent: ExtentPath) -> memoryview:
        """The extent's bytes; whoever keeps them past the install keeps the mapping alive."""
        return self.view[extent.offset : extent.offset + extent.length]

    def close(self) -> None:
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            # an error that is still being told holds a view: the mapping goes with it
            return


class Segments:
    """The mappings of a worker, each told to its writer. ``root`` is where segments are files."""

    def __init__(self, writer: MappingUser, *, root: Path = extent_record.SEGMENTS) -> None:
        self._writer = writer
        self._root = root
        self._mapped: dict[str, Segment] = {}

    def get(self, name: str) -> Segment:
        """The segment of that name as it is now. Raises OutOfReach, OSError or RuntimeError."""
        segment = self._mapped.get(name)
        if segment is not None and segment.current():
            return segment
        self.drop_old()
        segment = self._mapped[name] = Segment(self._root / name)
        self._writer.mapped(segment.view)
        return segment

    def drop_old(self) -> None:
        """An engine outlives its sidecars: without this their arenas' memory would never be free again."""
        for name, segment in list(self._mapped.items()):
            if not segment.current():
                del self._mapped[name]
                self._writer.unmapped(segment.view, segment.close)
