"""Files that are there whole and durable, and their owner's alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600


def fsync_folder(folder: Path) -> None:
    """A file that was renamed into it is there after a crash once this returns. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(file: Path) -> None:
    """Raises OSError."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def create_private(file: Path) -> BinaryIO:
    """A new file to write, which only its owner may read whatever the umask. Raises OSError, also where it exists."""
    return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE), "wb")
