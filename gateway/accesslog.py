"""One JSON line a request, written in batches by a thread: no request ever waits for a disk or a pipe."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Callable

import msgspec

_log = logging.getLogger(__name__)

_FLUSH_EVERY_S = 0.25
_FLUSH_AT_BYTES = 256 << 10
# batches that may wait for the writer: past 16 MiB the newest are dropped
_MAX_WAITING = 64


class AccessRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept of a request; no content, no key. Times in milliseconds, ``at`` in seconds since 1970; ``tokens``
    where its tenant has a quota of them.
    """

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
    tokens: int = 0
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

    ``sink`` runs in a thread of its own and may block. Batches that it raises OSError for, and those that find too many
    waiting for it, are lost and counted: requests go on. Made and used on one event loop.
    """

    def __init__(self, sink: Callable[[bytes], None], loop: asyncio.AbstractEventLoop) -> None:
        self._sink = sink
        self._loop = loop
        self._encoder = msgspec.json.Encoder()
        self._lines = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_MAX_WAITING)
        # each counted by one thread alone
        self._overflowed = 0
        self._unwritten = 0
        # a daemon: a sink that blocks for ever must not keep the process
        self._writer = threading.Thread(target=self._write_batches, name="access-log", daemon=True)
        self._writer.start()

    @property
    def dropped(self) -> int:
        """Records lost so far."""
        return self._overflowed + self._unwritten

    def add(self, record: AccessRecord) -> None:
        """Keep ``record`` for the next batch."""
        self._lines += self._encoder.encode(record)
        self._lines += b"\n"
        if len(self._lines) >= _FLUSH_AT_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(_FLUSH_EVERY_S, self.flush)

    def flush(self) -> None:
        """Hand what was collected to the writer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            batch, self._lines = bytes(self._lines), bytearray()
            try:
                self._waiting.put_nowait(batch)
            except queue.Full:
                self._overflowed += batch.count(b"\n")

    async def close(self, wait_s: float = 2.0) -> None:
        """Have what was collected written, if the sink takes it within ``wait_s`` seconds. Nothing is added after."""
        self.flush()
        await asyncio.to_thread(self._end_writer, wait_s)

    def _end_writer(self, wait_s: float) -> None:
        try:
            self._waiting.put(None, timeout=wait_s)
        except queue.Full:
            _log.warning("the end of the access log is lost: nobody reads it")
            return
        self._writer.join(wait_s)

    def _write_batches(self) -> None:
        while (batch := self._waiting.get()) is not None:
            try:
                self._sink(batch)
            except OSError as error:
                self._unwritten += batch.count(b"\n")
                _log.warning("%d bytes of the access log are lost: %s", len(batch), error)
