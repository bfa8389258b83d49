"""Checkpoint folders as the control makes them: drafts that take their name when all ranks have written. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import uuid
from pathlib import Path

from catalog.names import shown
from wire.outcomes import ArtifactUnavailable, InvalidRequest

from .manifest import NAME, StateManifest, read_manifest, write_manifest

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def make_draft(folder: Path) -> Path:
    """An empty hidden folder beside ``folder``. Raises ArtifactUnavailable."""
    draft = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise ArtifactUnavailable(f"cannot write {folder}: {error.strerror}") from error
    return draft


def commit_draft(draft: Path, folder: Path, manifest: StateManifest) -> None:
    """Let a draft that is written take its name, for good; what had it before goes. Raises ArtifactUnavailable."""
    try:
        write_manifest(draft, manifest)
        if folder.exists():
            _exchange(draft, folder)
            shutil.rmtree(draft)
        else:
            draft.rename(folder)
        _sync(folder.parent)
        # which may be as new as the folder
        _sync(folder.parent.parent)
    except OSError as error:
        raise ArtifactUnavailable(f"cannot write {folder}: {error.strerror}") from error


class Snapshots:
    """The trainer's own checkpoints: a folder a policy, in it the newest one under its change's number."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, policy: str, number: int) -> Path:
        """Where the state after change ``number`` goes."""
        return self._root / policy / str(number)

    def newest(self, policy: str) -> tuple[Path, StateManifest] | None:
        """The newest whole snapshot, if there is one. Raises InvalidRequest for one that is malformed."""
        for _, folder in sorted(self._numbered(policy), reverse=True):
            if (folder / NAME).is_file():
                return folder, read_manifest(folder)
        return None

    def drop_others(self, policy: str, kept: Path) -> None:
        """Remove all but ``kept``, drafts that were left over too; what can't be is for the next time."""
        with contextlib.suppress(OSError):
            for entry in (self._root / policy).iterdir():
                if entry != kept:
                    shutil.rmtree(entry, ignore_errors=True)

    def remove(self, policy: str) -> None:
        if policy in ("", ".", "..") or "/" in policy:
            raise InvalidRequest(f"{shown(policy)} is no policy's name", field="policy")
        shutil.rmtree(self._root / policy, ignore_errors=True)

    def _numbered(self, policy: str) -> list[tuple[int, Path]]:
        home = self._root / policy
        return [(int(entry.name), entry) for entry in home.iterdir() if entry.name.isdigit()] if home.is_dir() else []


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders in one step, so that there is a whole one under the name at any time."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
