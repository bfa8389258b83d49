"""One JSON line a request, written in batches so that a request never waits for a disk or a pipe."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import msgspec

_log = logging.getLogger(__name__)

_FLUSH_EVERY_S = 0.25
_FLUSH_AT_BYTES = 256 << 10


class AccessRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept of a request; no content, no key. Times in milliseconds, ``at`` in seconds since 1970."""

    at: float
    request_id: str
    route: str
    outcome: str
    status: int
    model: str = ""
    key_id: str = ""
    node: str = ""
    engine: str = ""
    waited_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    bytes_out: int = 0
    attempts: int = 0
    error: str = ""


def write_to(descriptor: int) -> Callable[[bytes], None]:
    """A sink that writes whole batches to a file descriptor."""

    def write(batch: bytes) -> None:
        view = memoryview(batch)
        while view:
            view = view[os.write(descriptor, view) :]

    return write


class AccessLog:
    """Collects records and hands them to ``sink`` a few times a second, or when many have come together.

    A sink that raises OSError loses its batch: requests go on.
    """

    def __init__(self, sink: Callable[[bytes], None], loop: asyncio.AbstractEventLoop) -> None:
        self._sink = sink
        self._loop = loop
        self._encoder = msgspec.json.Encoder()
        self._lines = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, record: AccessRecord) -> None:
        """Keep ``record`` for the next batch."""
        self._lines += self._encoder.encode(record)
        self._lines += b"\n"
        if len(self._lines) >= _FLUSH_AT_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(_FLUSH_EVERY_S, self.flush)

    def flush(self) -> None:
        """Write what was collected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            batch, self._lines = bytes(self._lines), bytearray()
            try:
                self._sink(batch)
            except OSError as error:
                _log.warning("%d bytes of the access log are lost: %s", len(batch), error)
