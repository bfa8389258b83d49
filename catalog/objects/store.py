"""A bucket, or a prefix of one, of immutable objects named by the blake3 digest of their bytes."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import obstore
from blake3 import blake3
from obstore.exceptions import AlreadyExistsError

from wire.outcomes import ArtifactUnavailable, StorageFull

from ..blobs import check_digest
from .download import ObjectSource
from .faults import told
from .location import BRISK, PATIENT, STEADY, Handle, Patience, connect
from .upload import ObjectWriter

# younger than this an object is left as it is when it is uploaded again, unless its bytes are not of its digest
RENEW_AFTER_S = 900.0
_READ_BYTES = 4 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Found(NamedTuple):
    """An artifact that is there: its bytes, and the seconds since they were put."""

    size: int
    age_s: float


class ObjectStore:
    """Shared by any number of processes. ``now`` is the clock that objects' ages go by.

    What is asked while somebody waits (``size``) gets an answer or an error within some two seconds; bytes are asked
    for again, with back-off, for as long as ``patience`` says (a minute).

    Raises InvalidRequest for an URL that names no store.
    """

    def __init__(
        self,
        url: str,
        *,
        endpoint: str = "",
        region: str = "",
        patience: Patience = PATIENT,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.url = url
        self.handle = connect(url, patience, endpoint=endpoint, region=region)
        self._steady = connect(url, STEADY, endpoint=endpoint, region=region)
        self._brisk = connect(url, BRISK, endpoint=endpoint, region=region)
        self.now = now

    def key(self, digest: str) -> str:
        """The object's name. Raises InvalidRequest for anything that is no digest."""
        check_digest(digest)
        return f"blobs/{digest[:2]}/{digest}"

    def writer(self, announced: str | None = None) -> ObjectWriter:
        """A new upload, as a context manager. ``announced`` saves large uploads a copy at the end."""
        return ObjectWriter(self, announced)

    def size(self, digest: str) -> int | None:
        """Bytes of the artifact; None where it is not in the store. Raises InvalidRequest and ArtifactUnavailable."""
        found = self.find(digest)
        return None if found is None else found.size

    def find(self, digest: str) -> Found | None:
        """The same with its age."""
        return self._find(self._brisk, digest)

    def needs_nothing(self, digest: str, size: int) -> bool:
        """Whether the object is there, of ``size`` bytes, young, and of its digest: all of it is read.

        What can't be read counts as in need of an upload. Raises ArtifactUnavailable where it can't be looked for.
        """
        found = self._find(self.handle, digest)
        if found is None or found.size != size or found.age_s >= RENEW_AFTER_S:
            return False
        try:
            self.verify(digest)
        except ArtifactUnavailable:
            return False
        return True

    def probe(self) -> None:
        """Find out whether this store does what artifacts need, with a small object that goes again.

        Raises ArtifactUnavailable, StorageFull.
        """
        key = f"partial/probe-{secrets.token_hex(8)}"
        with told("list the object store"):
            next(obstore.list(self._brisk, "partial", chunk_size=1), None)
        with told("write to the object store"):
            obstore.put(self._brisk, key, b"probe", mode="create", use_multipart=False)
        try:
            with told("write to the object store under a condition"), contextlib.suppress(AlreadyExistsError):
                obstore.put(self._brisk, key, b"probe", mode="create", use_multipart=False)
                raise ArtifactUnavailable("the object store ignores conditions: it would give one name twice")
        finally:
            with told("delete from the object store"):
                obstore.delete(self._brisk, key)

    @contextlib.contextmanager
    def open(self, digest: str) -> Iterator[ObjectSource]:
        """An artifact to be read into memory. Raises ArtifactUnavailable where it is not there."""
        key = self.key(digest)
        with told(f"read artifact {digest}"):
            size = obstore.head(self._steady, key)["size"]
        yield ObjectSource(self.handle, key, digest, size)

    @contextlib.contextmanager
    def as_file(self, digest: str) -> Iterator[Path]:
        """A private copy on this host's disk, verified, for as long as the block lasts.

        Raises ArtifactUnavailable where it is missing or corrupt, StorageFull where the disk has no room for it.
        """
        with self.open(digest) as source, tempfile.NamedTemporaryFile(prefix="roost-artifact-") as file:
            if source.size:
                self._copy_to(source, file.fileno(), digest)
            yield Path(file.name)

    def verify(self, digest: str) -> None:
        """Read all of the object. Raises ArtifactUnavailable where it is missing, unreadable or not of its digest."""
        hasher = blake3()
        with told(f"read artifact {digest}"):
            for chunk in obstore.get(self.handle, self.key(digest)).stream(min_chunk_size=_READ_BYTES):
                hasher.update(chunk)
        check_found(digest, hasher.hexdigest())

    def _find(self, handle: Handle, digest: str) -> Found | None:
        key = self.key(digest)
        with told(f"look for artifact {digest}"):
            try:
                meta = obstore.head(handle, key)
            except FileNotFoundError:
                return None
        return Found(meta["size"], self.now() - meta["last_modified"].timestamp())

    @staticmethod
    def _copy_to(source: ObjectSource, file: int, digest: str) -> None:
        try:
            # a full disk is told here, and not by SIGBUS at a write to the mapping
            os.posix_fallocate(file, 0, source.size)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise StorageFull(f"there is no room for a copy of artifact {digest}", retry_after_s=30.0) from error
        with mmap.mmap(file, source.size) as mapped, memoryview(mapped) as view:
            found = source.fill(view, lambda: False)
        check_found(digest, found)


def check_found(digest: str, found: str | None) -> None:
    """Raises ArtifactUnavailable unless the bytes that were read have the digest that they are stored under."""
    if found != digest:
        raise ArtifactUnavailable(f"artifact {digest} is corrupt: its bytes have digest {found}", field="digest")
