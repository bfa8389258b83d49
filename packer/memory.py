"""Fresh memory for a whole file, ordinary and anonymous."""

from __future__ import annotations

import mmap
from threading import Thread
from typing import Any

import numpy as np


class FreshMemory:
    """A sink of at most ``capacity`` bytes, whose pages come into being while its owner finds out what to write."""

    def __init__(self, capacity: int) -> None:
        self._map = mmap.mmap(-1, max(capacity, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
