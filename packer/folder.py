"""Files of a folder that somebody else made: read without leaving it, written all or nothing."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from wire.outcomes import ArtifactUnavailable, InvalidRequest, StorageFull

_AT_ONCE_BYTES = 1 << 30
_FULL = (errno.ENOSPC, errno.EDQUOT)


def confined(folder: Path, name: str) -> Path:
    """The real path of ``folder/name``, a regular file that no link leads out of the folder.

    The one lawful way out is a Hugging Face cache's: from ``snapshots/REVISION/`` to ``blobs/``. Raises
    InvalidRequest.
    """
    try:
        home = folder.resolve(strict=True)
        path = (home / name).resolve(strict=True)
        mode = path.stat().st_mode
    except (OSError, RuntimeError):
        raise InvalidRequest(f"{folder} has no readable {name}", field=name) from None
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
    if not any(path.is_relative_to(allowed) for allowed in homes):
        raise InvalidRequest(f"{name} is a link that leads out of {folder}", field=name)
    if not stat.S_ISREG(mode):
        raise InvalidRequest(f"{name} in {folder} is not a regular file", field=name)
    return path


def read_bounded(path: Path, most: int) -> bytes:
    """A small file's bytes. Raises InvalidRequest past ``most`` bytes, ArtifactUnavailable if it can't be read."""
    try:
        # without O_NONBLOCK a pipe that nobody writes to is waited for
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a file")
            # a buffer of what is there, not of what might be
            raw = file.read(min(most, status.st_size) + 1)
    except OSError as error:
        raise ArtifactUnavailable(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > most:
        raise InvalidRequest(f"{path.name} is larger than {most} bytes", field=path.name)
    return raw


def map_file(path: Path, *, whole: bool = False) -> memoryview:
    """A file's bytes, mapped read-only for as long as a view lives. Raises InvalidRequest, ArtifactUnavailable.

    ``whole`` says that all of it is about to be read: a file of moderate size is then mapped in one go, which costs a
    fraction of a fault a page.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise InvalidRequest(f"{path.name} is empty", field=path.name)
            at_once = mmap.MAP_POPULATE if whole and size <= _AT_ONCE_BYTES else 0
            return memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | at_once, prot=mmap.PROT_READ))
    except OSError as error:
        raise ArtifactUnavailable(f"cannot read {path}: {error.strerror}") from error


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder beside ``folder`` to write into; it takes the name when the block ends well, else it goes.

    Raises InvalidRequest if the name is taken by anything but an empty folder, StorageFull, ArtifactUnavailable.
    """
    draft = folder.parent / f".{folder.name}.{secrets.token_hex(8)}"
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InvalidRequest(f"{folder} exists already", field="folder")
        draft.mkdir(parents=True, mode=0o755)
        yield draft
        draft.rename(folder)
    except OSError as error:
        if isinstance(error, ArtifactUnavailable | StorageFull):
            raise
        if error.errno in _FULL:
            raise StorageFull(f"no space to write {folder}") from error
        raise ArtifactUnavailable(f"cannot write {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
