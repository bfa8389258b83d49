"""The PEFT folders that a portable load names: written once, kept for as long as the engine may read them.

A folder's modification time is when it was last needed: written, or its adapter forgotten by a server that may still
read it. So a restarted sidecar clears up what its former life left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from catalog.names import split_adapter_name
from wire.outcomes import InvalidRequest

# longer than any request may still run on an adapter that a stock server has forgotten
KEEP_FORGOTTEN_S = 3600.0


class AdapterFolders:
    """The folders of one engine, each named for its adapter."""

    def __init__(self, root: Path, *, keep_s: float = KEEP_FORGOTTEN_S) -> None:
        self._root = root.resolve()
        self._keep_s = keep_s

    def path(self, adapter: str) -> Path:
        """Where the adapter's folder is, or would be. Raises InvalidRequest for a name that is not ours."""
        if split_adapter_name(adapter) is None:
            raise InvalidRequest(f"{adapter[:80]!r} is not the name of an adapter of ours", field="adapter")
        return self._root / adapter

    def write(self, adapter: str, fill: Callable[[Path], None]) -> Path:
        """Have ``fill`` make the folder, whole or not at all, unless it is there. Raises what ``fill`` raises."""
        folder = self.path(adapter)
        if folder.is_dir():
            os.utime(folder)
        else:
            fill(folder)
        return folder

    def discard(self, adapter: str) -> None:
        """Remove the folder of an adapter that the engine no longer has."""
        shutil.rmtree(self.path(adapter), ignore_errors=True)

    def forget(self, adapter: str) -> None:
        """The engine dropped the name but may still read the folder: ``sweep`` removes it later."""
        folder = self.path(adapter)
        if folder.is_dir():
            os.utime(folder)

    def sweep(self, named: Collection[str], *, now: float) -> None:
        """Remove folders, drafts too, that ``named`` lacks and that nothing needed for a while (Unix time)."""
        if not self._root.is_dir():
            return
        for folder in self._root.iterdir():
            if folder.name not in named and folder.stat().st_mtime + self._keep_s < now:
                shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> None:
        """Remove all folders: the engine that could read them is gone."""
        shutil.rmtree(self._root, ignore_errors=True)
