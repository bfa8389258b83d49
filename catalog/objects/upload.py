"""One upload to an object store: streamed in parts, with the digest computed on the way and bound at the end.

What fits in a part is held back and put in one conditional request. More is a multipart upload, which no reader sees
until it is completed, and which is completed only when the bytes have been found to be of their digest: a process that
is killed before that leaves no object. Announce the digest and the parts go to the object of that name; otherwise they
go to ``partial/``, and the store copies them to their name at the end.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

import obstore
from blake3 import blake3
from obstore.exceptions import AlreadyExistsError, BaseError

from wire.outcomes import ArtifactUnavailable

from ..blobs import Stored, check_announced, check_digest
from .faults import is_answered, told
from .location import Handle

# at the 10,000 parts that S3 allows, 80 GiB in one object
PART_BYTES = 8 << 20
# parts on their way at a time: with those that gather, a few dozen MiB an upload
_PARTS_IN_FLIGHT = 4
_LOOK_EVERY_S = 0.1


class Place(Protocol):
    """What an upload asks of its store."""

    handle: Handle

    def key(self, digest: str) -> str: ...

    def needs_nothing(self, digest: str, size: int) -> bool:
        """Whether the object is there, young enough not to need its age renewed, and its bytes are of its digest."""


class ObjectWriter:
    """Nothing of it can be named unless ``commit`` returned. Not for use from two threads at once."""

    def __init__(self, place: Place, announced: str | None) -> None:
        self._place = place
        self._announced = None if announced is None else check_digest(announced)
        self._target = place.key(announced) if announced is not None else f"partial/{secrets.token_hex(16)}"
        self._hasher = blake3()
        self._size = 0
        self._gathered = bytearray()
        self._stream: _PartStream | None = None

    def __enter__(self) -> ObjectWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append; waits while parts are on their way. Raises StorageFull and ArtifactUnavailable."""
        rest = memoryview(data).cast("B")
        self._hasher.update(rest)
        self._size += len(rest)
        for start in range(0, len(rest), PART_BYTES):
            self._gathered += rest[start : start + PART_BYTES]
            if len(self._gathered) > PART_BYTES:
                part = bytes(memoryview(self._gathered)[:PART_BYTES])
                del self._gathered[:PART_BYTES]
                self._started().feed(part)

    def commit(self, expected_digest: str | None = None) -> Stored:
        """Give the bytes their name. Raises ArtifactUnavailable where they are not of ``expected_digest`` (or of the
        announced one) or the store can't be reached, InvalidRequest where that is no digest, and StorageFull."""
        digest: str = self._hasher.hexdigest()
        expected = expected_digest if expected_digest is not None else self._announced
        try:
            check_announced(digest, expected)
            with told("store an artifact"):
                if self._stream is None:
                    self._put_whole(digest)
                elif not self._place.needs_nothing(digest, self._size):
                    self._complete(self._stream, digest)
        finally:
            self.abort()
        return Stored(digest, self._size)

    def abort(self) -> None:
        """Drop what was sent, if it was not committed. May be called again."""
        self._gathered.clear()
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.abort()

    def _started(self) -> _PartStream:
        if self._stream is None:
            self._stream = _PartStream(self._place.handle, self._target)
        return self._stream

    def _put_whole(self, digest: str) -> None:
        """The same digest twice is one object: only what is old, not whole or corrupt is put again."""
        key, data = self._place.key(digest), bytes(self._gathered)
        try:
            obstore.put(self._place.handle, key, data, mode="create", use_multipart=False)
            return
        except AlreadyExistsError:
            if self._place.needs_nothing(digest, self._size):
                return
        except BaseError as error:
            # the client does not repeat a condition that may have been met already; the same bytes may be repeated
            if is_answered(error):
                raise
        obstore.put(self._place.handle, key, data, mode="overwrite", use_multipart=False)

    def _complete(self, stream: _PartStream, digest: str) -> None:
        stream.feed(bytes(self._gathered))
        stream.finish()
        key = self._place.key(digest)
        if self._target != key:
            try:
                obstore.copy(self._place.handle, self._target, key)
            finally:
                # what a failure leaves, the sweep finds
                with contextlib.suppress(Exception):
                    obstore.delete(self._place.handle, self._target)


class _Dropped(Exception):
    """Ends a part stream without completing it."""


class _PartStream:
    """A multipart upload in a thread: the client pulls parts from an iterator, which ends it well or fails it.

    The iterator's failing makes the client abort the upload, so that no parts are kept.
    """

    def __init__(self, handle: Handle, key: str) -> None:
        self._handle = handle
        self._key = key
        self._parts: queue.Queue[bytes | None] = queue.Queue(maxsize=1)
        self._dropped = threading.Event()
        self._failure: Exception | None = None
        self._completed = False
        self._thread = threading.Thread(target=self._upload, name="upload", daemon=True)
        self._thread.start()

    def feed(self, part: bytes) -> None:
        """Hand a part over, once there is room for it. Raises what the upload failed with, as ours."""
        self._hand_over(part)

    def finish(self) -> None:
        """Complete the upload. Raises what it failed with, as ours."""
        self._hand_over(None)
        self._thread.join()
        self._raise_failure()
        if not self._completed:
            raise ArtifactUnavailable("can't store an artifact: its upload ended early")

    def abort(self) -> None:
        """End the upload, if it has not ended, without an object."""
        self._dropped.set()
        self._thread.join()

    def _hand_over(self, part: bytes | None) -> None:
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._parts.put(part, timeout=_LOOK_EVERY_S)
                return
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            with told("store an artifact"):
                raise self._failure

    def _upload(self) -> None:
        try:
            obstore.put(
                self._handle,
                self._key,
                self._pull(),
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=_PARTS_IN_FLIGHT,
            )
            self._completed = True
        except _Dropped:
            return
        except Exception as error:
            self._failure = error

    def _pull(self) -> Iterator[bytes]:
        while True:
            if self._dropped.is_set():
                raise _Dropped
            with contextlib.suppress(queue.Empty):
                part = self._parts.get(timeout=_LOOK_EVERY_S)
                if part is None:
                    return
                yield part
