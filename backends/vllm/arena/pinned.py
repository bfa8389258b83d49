"""The arena's mapping as pinned memory, through CUDA's driver: the runtime's functions that torch shows do not copy
from a bare address, and an error of theirs would stay behind for whoever asks next.

Registering takes the host's memory for the whole mapping. Steps and installs go on meanwhile: a thread does it, chunk
by chunk. The driver lets nobody launch a kernel while it registers a chunk, so that the chunk's memory is found before,
and there is a rest after. One transfer never spans two chunks: the driver refuses that.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)

# 2 ms to register, where the memory is there
CHUNK_BYTES = 32 << 20
# of the time, so that a step is never slowed down by more than a quarter
_REST = 3.0
# 5 ms to find, for which the process can map nothing else
_FOUND_AT_ONCE = 8 << 20

_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14
_PORTABLE, _READ_ONLY = 0x01, 0x08  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_READ_ONLY


class PinnedMapping:
    """``size`` bytes at ``address``, mapped read-only, being registered from the first on.

    The driver's context is that of the thread that makes this. ``close`` before the mapping goes.
    """

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size
        self._registered = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._register, args=(_context(),), name="roost-pin", daemon=True)
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

    def join(self) -> None:
        """Wait until as much is registered as will be."""
        self._thread.join()

    def close(self) -> None:
        """Stop registering and undo it. No transfer may be under way."""
        self._stop.set()
        self._thread.join()
        for start in range(0, self._registered, CHUNK_BYTES):
            _call("cuMemHostUnregister", ctypes.c_void_p(self.address + start))
        self._registered = 0

    def _register(self, context: ctypes.c_void_p) -> None:
        _call("cuCtxSetCurrent", context)
        while self._registered < self.size and not self._stop.is_set():
            start, size = self.address + self._registered, min(CHUNK_BYTES, self.size - self._registered)
            _find_memory(start, size)
            begun = time.monotonic()
            try:
                _call(
                    "cuMemHostRegister_v2",
                    ctypes.c_void_p(start),
                    ctypes.c_size_t(size),
                    ctypes.c_uint(_PORTABLE | _READ_ONLY),
                )
            except RuntimeError as error:
                logger.warning(
                    "only %d of the arena's %d bytes can be pinned, others are copied on the way to the device: %s",
                    self._registered, self.size, error,
                )  # fmt: skip
                return
            self._registered += size
            self._stop.wait(_REST * (time.monotonic() - begun))


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
