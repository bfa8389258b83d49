"""The artifact store: a folder of immutable files named by the blake3 digest of their bytes.

``blobs/ab/abcd...`` holds what is complete, ``partial/`` what is being written. A file is fsynced before it is renamed
into place, and its folder after, so that a name in ``blobs`` always stands for all of its bytes, also after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec
from blake3 import blake3

from wire.outcomes import ArtifactUnavailable, InvalidRequest, RoostError, StorageFull

from .names import shown

_DIGEST_RE = re.compile(r"[0-9a-f]{64}", re.ASCII)
_BLOB_MODE = 0o444
_READ_BYTES = 1 << 20
# large enough for a disk, small enough to notice soon that a reader gave up
_FILL_BYTES = 4 << 20
# how many blobs a step of the sweep removes at most
_SWEPT_AT_ONCE = 500
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Stored(msgspec.Struct, frozen=True):
    """A blob in place. ``size`` in bytes."""

    digest: str
    size: int


class Swept(msgspec.Struct, frozen=True):
    """What a clean-up removed, in files and bytes."""

    removed: int
    bytes: int

    def plus(self, other: Swept) -> Swept:
        return Swept(self.removed + other.removed, self.bytes + other.bytes)


class Orphans(Protocol):
    """How a sweep learns what it may remove."""

    def __call__(self, digests: Sequence[str], /) -> AbstractContextManager[frozenset[str]]:
        """Those of ``digests`` that no event names; and until the context ends, none will."""


def is_digest(text: str) -> bool:
    """Whether ``text`` is a blake3 digest in lower-case hex."""
    return _DIGEST_RE.fullmatch(text) is not None


def check_digest(text: str, field: str = "digest") -> str:
    """``text`` if it is a blake3 digest in lower-case hex. Raises InvalidRequest."""
    if not is_digest(text):
        raise InvalidRequest(f"{field} {shown(text)} is not a digest: expected 64 lower-case hex digits", field=field)
    return text


def check_announced(digest: str, announced: str | None) -> None:
    """Raises ArtifactUnavailable where bytes of ``digest`` were ``announced`` as others, InvalidRequest where that is
    no digest.
    """
    if announced is not None and check_digest(announced) != digest:
        raise ArtifactUnavailable(f"the bytes have digest {digest}, not {announced} as announced", field="digest")


class BlobStore:
    """A content-addressed folder, shared by any number of processes. ``now`` is the clock that file ages go by."""

    # a look into a folder takes no time that is worth saving
    look = None

    def __init__(self, root: Path, *, now: Callable[[], float] = time.time) -> None:
        self.root = root
        self._blobs = root / "blobs"
        self._partial = root / "partial"
        self._now = now
        # folders whose own names this process knows to be durable: another process may have made one just now
        self._durable_folders: set[Path] = set()
        with _storage(f"make the store in {root}"):
            for folder in (self._blobs, self._partial):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _fsync_folder(root)
            _fsync_folder(root.parent)

    def writer(self, announced: str | None = None) -> BlobWriter:
        """A new partial file, as a context manager; ``announced`` is the digest to expect. Raises StorageFull."""
        return BlobWriter(self, self._partial / secrets.token_hex(16), announced)

    def removing(self, digest: str) -> bool:
        """Never seen: a blob is removed within a step of the sweep."""
        return False

    def missed(self) -> frozenset[str]:
        """Nothing need be looked for."""
        return frozenset()

    def forget(self, digests: Iterable[str]) -> None:
        """Nothing is remembered."""

    def path(self, digest: str) -> Path:
        """Where the blob is or would be. Raises InvalidRequest for anything that is no digest."""
        check_digest(digest)
        return self._blobs / digest[:2] / digest

    def size(self, digest: str) -> int | None:
        """Bytes of the blob; None where it is not in the store. Raises InvalidRequest and ArtifactUnavailable."""
        # asked for by every publish: building a Path would take longer than looking
        path = f"{self._blobs}/{check_digest(digest)[:2]}/{digest}"
        with _storage(f"look for artifact {digest}"):
            try:
                return os.stat(path).st_size  # noqa: PTH116
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def open(self, digest: str) -> Iterator[BlobSource]:
        """A blob to be read into memory. Raises ArtifactUnavailable where it can't be read."""
        try:
            file = os.open(self.path(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ArtifactUnavailable(f"artifact {digest} can't be read: {error.strerror}") from error
        try:
            yield BlobSource(file, digest)
        finally:
            os.close(file)

    @contextlib.contextmanager
    def as_file(self, digest: str) -> Iterator[Path]:
        """The blob itself, for a block that looks into it. Whether it is of its digest is not looked at."""
        yield self.path(digest)

    def verify(self, digest: str) -> None:
        """Read all of the blob. Raises ArtifactUnavailable where it is missing, unreadable or not of its digest."""
        hasher = blake3()
        buffer = bytearray(_READ_BYTES)
        try:
            with self.path(digest).open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    hasher.update(memoryview(buffer)[:count])
        except OSError as error:
            raise ArtifactUnavailable(f"artifact {digest} can't be read: {error.strerror}", field="digest") from error
        found = hasher.hexdigest()
        if found != digest:
            raise ArtifactUnavailable(f"artifact {digest} is corrupt: its bytes have digest {found}", field="digest")

    def stored(self) -> list[Stored]:
        """Every blob, the one that was modified longest ago first. Raises ArtifactUnavailable."""
        found: list[tuple[int, Stored]] = []
        with _storage("list the store"):
            for folder in list(os.scandir(self._blobs)):
                for entry in os.scandir(folder.path):
                    if is_digest(entry.name) and entry.is_file(follow_symlinks=False):
                        known = entry.stat()
                        found.append((known.st_mtime_ns, Stored(entry.name, known.st_size)))
        return [blob for _, blob in sorted(found, key=lambda pair: pair[0])]

    def remove(self, digest: str) -> None:
        """For a store that is this process's alone; others sweep. Raises InvalidRequest, ArtifactUnavailable."""
        with _storage(f"remove artifact {digest}"):
            self.path(digest).unlink(missing_ok=True)

    def sweep(self, orphans: Orphans, older_than_s: float) -> Swept:
        """Remove blobs that are ``orphans`` and partial files that nobody writes, past an age in seconds.

        Safe against uploads under way, also of the very blob that is being removed. Raises ArtifactUnavailable where
        the store can't be read.
        """
        total = Swept(0, 0)
        for step in self.sweep_by_folder(orphans, older_than_s):
            total = total.plus(step)
        return total

    def sweep_by_folder(self, orphans: Orphans, older_than_s: float) -> Iterator[Swept]:
        """The same, a part of one folder at each step, so that other work can come between."""
        limit = self._now() - older_than_s
        with _storage("clean up the store"):
            yield _swept(self._sweep_partial(limit))
            for folder in list(os.scandir(self._blobs)):
                old = [entry.name for entry in os.scandir(folder.path) if _is_old_blob(entry, limit)]
                for start in range(0, len(old), _SWEPT_AT_ONCE):
                    with orphans(old[start : start + _SWEPT_AT_ONCE]) as unnamed:
                        removed = _swept(self._remove_all(Path(folder.path), unnamed, limit))
                    yield removed

    def place(self, partial: Path, digest: str) -> None:
        """Rename a fsynced partial file into place, durably. A blob that is there already is replaced by the same
        bytes, which renews its age and mends what a disk may have done to it."""
        target = self.path(digest)
        folder = target.parent
        if folder not in self._durable_folders:
            folder.mkdir(exist_ok=True, mode=0o700)
            _fsync_folder(self._blobs)
            self._durable_folders.add(folder)
        partial.rename(target)
        _fsync_folder(folder)

    def _sweep_partial(self, limit: float) -> Iterator[int]:
        for entry in list(os.scandir(self._partial)):
            with contextlib.suppress(FileNotFoundError), Path(entry.path).open("rb") as file:
                if entry.stat().st_mtime <= limit and _lock(file.fileno()):
                    Path(entry.path).unlink()
                    yield entry.stat().st_size

    def _remove_all(self, folder: Path, digests: frozenset[str], limit: float) -> Iterator[int]:
        for digest in digests:
            with contextlib.suppress(FileNotFoundError):
                size = (folder / digest).stat().st_size
                if self._remove(folder / digest, limit):
                    yield size

    def _remove(self, blob: Path, limit: float) -> bool:
        """Remove an old blob, unless it was uploaded again since its age was read.

        It is moved aside first: an upload that was placed before the move is seen by its age and put back, and one that
        is placed after the move is not touched.
        """
        aside = self._partial / f"{blob.name}.{secrets.token_hex(4)}"
        blob.rename(aside)
        if aside.stat().st_mtime > limit:
            aside.rename(blob)
            _fsync_folder(blob.parent)
            return False
        aside.unlink()
        return True


def _is_old_blob(entry: os.DirEntry[str], limit: float) -> bool:
    try:
        return is_digest(entry.name) and entry.stat().st_mtime <= limit
    except FileNotFoundError:
        return False


class BlobSource:
    """A blob that is open. ``size`` in bytes."""

    def __init__(self, file: int, digest: str) -> None:
        self._file = file
        self._digest = digest
        self.size = os.fstat(file).st_size

    def fill(self, view: memoryview, given_up: Callable[[], bool]) -> str | None:
        """Fill ``view`` (``size`` bytes) and return the digest of what is in it then; None if it was given up.

        Raises ArtifactUnavailable.
        """
        hasher = blake3()
        at = 0
        with _storage(f"read artifact {self._digest}"):
            while at < len(view):
                if given_up():
                    return None
                with view[at : at + _FILL_BYTES] as rest:
                    count = os.readv(self._file, [rest])
                if count == 0:
                    # it shrank: the digest will tell
                    break
                with view[at : at + count] as arrived:
                    hasher.update(arrived)
                at += count
        return hasher.hexdigest()


class BlobWriter:
    """One upload. Nothing of it remains unless ``commit`` returned. Not for use from two threads at once."""

    def __init__(self, store: BlobStore, partial: Path, announced: str | None = None) -> None:
        self._store = store
        self._partial = partial
        self._announced = None if announced is None else check_digest(announced)
        self._hasher = blake3()
        self._size = 0
        with _storage("begin an artifact"):
            self._fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # held until the file is closed: the sweep leaves a locked file alone, however slow its upload
        _lock(self._fd)

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. Raises StorageFull."""
        rest = memoryview(data).cast("B")
        self._hasher.update(rest)
        self._size += len(rest)
        with _storage("write an artifact"):
            while rest:
                rest = rest[os.write(self._fd, rest) :]

    def commit(self, expected_digest: str | None = None) -> Stored:
        """Make the bytes a blob, durably. Raises ArtifactUnavailable where they are not of ``expected_digest`` (or
        of the announced one), InvalidRequest where that is no digest, and StorageFull; then nothing is left behind."""
        digest: str = self._hasher.hexdigest()
        expected = expected_digest if expected_digest is not None else self._announced
        try:
            check_announced(digest, expected)
            with _storage("store an artifact"):
                os.fchmod(self._fd, _BLOB_MODE)
                os.fsync(self._fd)
                self._store.place(self._partial, digest)
        finally:
            self.abort()
        return Stored(digest, self._size)

    def abort(self) -> None:
        """Drop what was written, if it was not committed. May be called again."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._partial.unlink(missing_ok=True)
            os.close(fd)


def _swept(sizes: Iterator[int]) -> Swept:
    removed = list(sizes)
    return Swept(len(removed), sum(removed))


def _lock(fd: int) -> bool:
    """Take the file's advisory lock without waiting; False where another process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _storage(doing: str) -> Iterator[None]:
    """What the disk says becomes what the caller is told."""
    try:
        yield
    except OSError as error:
        if isinstance(error, RoostError):
            raise
        if error.errno in _FULL:
            raise StorageFull(f"there is no room to {doing}: {error.strerror}", retry_after_s=30.0) from error
        raise ArtifactUnavailable(f"can't {doing}: {error.strerror}") from error
