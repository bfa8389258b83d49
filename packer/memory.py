"""Fresh memory for a whole file, anonymous and in large pages where the system gives them."""

from __future__ import annotations

import contextlib
import mmap
from threading import Thread
from typing import Any

import numpy as np

_LARGE_PAGE = 2 << 20


class FreshMemory:
    """A sink of at most ``capacity`` bytes, whose pages come into being while its owner finds out what to write."""

    def __init__(self, capacity: int) -> None:
        rounded = -(-max(capacity, 1) // _LARGE_PAGE) * _LARGE_PAGE
        self._map = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            # a system without them gives small pages, which are slower and no less right
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._capacity = capacity
        self.size = 0
        self._touching = Thread(target=self._touch, name="fresh-memory", daemon=True)
        self._touching.start()

    def _touch(self) -> None:
        # one call, which does without the interpreter's lock
        self._bytes[:: mmap.PAGESIZE] = 0

    def write(self, data: Any, /) -> None:
        """Raises ValueError past the capacity."""
        given = np.frombuffer(data, np.uint8)
        if self.size + given.size > self._capacity:
            raise ValueError(f"{self.size + given.size} bytes are more than the capacity of {self._capacity}")
        self._touching.join()
        self._bytes[self.size : self.size + given.size] = given
        self.size += given.size

    @property
    def view(self) -> memoryview:
        """What was written so far."""
        return memoryview(self._map)[: self.size].toreadonly()
