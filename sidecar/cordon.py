"""The mark of a node that is out of service: a file beside its engine records, for the sidecar's next life."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class Mark(Protocol):
    """What remembers over the lives of a sidecar whether its node is cordoned."""

    def is_set(self) -> bool: ...

    def set(self, *, on: bool) -> None:
        """Raises OSError where it can't be kept."""


class CordonFile:
    """The mark as a file of ``run_dir``, which survives a crash of the host too once ``set`` has returned."""

    def __init__(self, run_dir: str, node: str) -> None:
        self._path = Path(run_dir) / f"{node}.cordoned"

    def is_set(self) -> bool:
        return self._path.exists()

    def set(self, *, on: bool) -> None:
        if on:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        elif self._path.exists():
            self._path.unlink()
        else:
            return
        _sync(self._path.parent)


def _sync(folder: Path) -> None:
    """An empty file is an entry of its folder and nothing else."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
