"""The arena's mapping as pinned memory, through CUDA's driver: the runtime's functions that torch shows do not copy
from a bare address, and an error of theirs would stay behind for whoever asks next.

Registering takes the host's memory for the whole mapping, as long as some is left for others. Steps and installs go on
meanwhile: a thread does it, chunk by chunk. The driver lets nobody launch a kernel while it registers a chunk, so that
the chunk's memory is found before, and there is a rest after. One transfer never spans two chunks: the driver refuses
that.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from backends.extent_record import SEGMENTS

logger = logging.getLogger(__name__)

# 2 ms to register, where the memory is there
CHUNK_BYTES = 32 << 20
# of the time, so that a step is never slowed down by more than a quarter
_REST = 3.0
# 5 ms to find, for which the process can map nothing else
_FOUND_AT_ONCE = 8 << 20

# of the host's shared memory this part stays free: an eighth
_LEFT_TO_OTHERS = 8

_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14
_PORTABLE, _READ_ONLY = 0x01, 0x08  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_READ_ONLY


class PinnedMapping:
    """``size`` bytes at ``address``, mapped read-only, being registered from the first on.

    The driver's context is that of the thread that makes this. ``release`` before the mapping goes.
    """

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size
        self._registered = 0
        self._stop = threading.Event()
        self._all = threading.Event()
        self._close: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, args=(_context(),), name="roost-pin", daemon=True)
        self._thread.start()

    def has(self, address: int, size: int) -> bool:
        """Whether the bytes are of this mapping."""
        return self.address <= address and address + size <= self.address + self.size

    def pinned(self, address: int, size: int) -> bool:
        """Whether all of the mapping's first bytes, up to the end of these, are registered by now."""
        return address + size <= self.address + self._registered

    def parts(self, address: int, size: int) -> Iterator[tuple[int, int]]:
        """The bytes as (address, size), one a chunk."""
        return parts(self.address, address, size, CHUNK_BYTES)

    def wait(self) -> None:
        """Return when as much is registered as will be."""
        self._all.wait()

    def release(self, close: Callable[[], None]) -> None:
        """Stop registering and undo it, then ``close``, on another thread: steps go on.

        No transfer may be under way.
        """
        self._close = close
        self._stop.set()

    def _run(self, context: ctypes.c_void_p) -> None:
        try:
            _call("cuCtxSetCurrent", context)
            self._register()
        except RuntimeError as error:
            logger.warning(
                "only %d of the arena's %d bytes are pinned, others are copied on the way to the device: %s",
                self._registered, self.size, error,
            )  # fmt: skip
        finally:
            self._all.set()
        self._stop.wait()
        try:
            for start in range(0, self._registered, CHUNK_BYTES):
                _call("cuMemHostUnregister", ctypes.c_void_p(self.address + start))
        except RuntimeError as error:
            logger.warning("the pages of an arena that is gone stay pinned: %s", error)
        finally:
            self._close()

    def _register(self) -> None:
        """Raises RuntimeError where the driver refuses, or the host has no memory to spare."""
        while self._registered < self.size and not self._stop.is_set():
            start, size = self.address + self._registered, min(CHUNK_BYTES, self.size - self._registered)
            check_room(_missing(start, size), SEGMENTS)
            _find_memory(start, size)
            begun = time.monotonic()
            _call(
                "cuMemHostRegister_v2",
                ctypes.c_void_p(start),
                ctypes.c_size_t(size),
                ctypes.c_uint(_PORTABLE | _READ_ONLY),
            )
            self._registered += size
            self._stop.wait(_REST * (time.monotonic() - begun))


def check_room(size: int, folder: Path) -> None:
    """Raises RuntimeError where ``size`` bytes more would leave too little of the folder's memory for others.

    Engines' workers talk to each other through it, and end by a signal where it is full.
    """
    found = os.statvfs(folder)
    left = found.f_bavail * found.f_frsize - size
    if size and left < found.f_blocks * found.f_frsize // _LEFT_TO_OTHERS:
        raise RuntimeError(f"{folder} would have no more than {max(left, 0)} bytes left for others")


def _missing(address: int, size: int) -> int:
    """How many of these bytes have no memory of the host yet."""
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    _libc().mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
    return mmap.PAGESIZE * int(np.count_nonzero(pages & 1 == 0))


def _find_memory(address: int, size: int) -> None:
    """Have the system map all pages, as registering would. Where it can't, registering says so."""
    for start in range(address, address + size, _FOUND_AT_ONCE):
        length = min(_FOUND_AT_ONCE, address + size - start)
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(_POPULATE_READ))


def parts(origin: int, address: int, size: int, chunk: int) -> Iterator[tuple[int, int]]:
    """``size`` bytes at ``address`` as (address, size), cut where chunks end, the first of which is at ``origin``."""
    end = address + size
    while address < end:
        limit = origin + ((address - origin) // chunk + 1) * chunk
        yield address, min(end, limit) - address
        address = limit


def copy_to_device(destination: int, source: int, size: int, stream: int) -> None:
    """Start a copy of ``size`` bytes from the host to the device on ``stream``. Raises RuntimeError."""
    _call(
        "cuMemcpyHtoDAsync_v2",
        ctypes.c_uint64(destination),
        ctypes.c_void_p(source),
        ctypes.c_size_t(size),
        ctypes.c_void_p(stream),
    )


def _context() -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    return context


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """Raises RuntimeError with the driver's name for what went wrong."""
    result = getattr(_driver(), name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown').decode()} ({result})")
