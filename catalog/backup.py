"""A copy of the catalog that is a catalog itself, made while others write."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from wire.outcomes import InvalidRequest, JournalUnavailable

from .compaction import base_of, opened_base
from .durable import PRIVATE, create_private, fsync_file, fsync_folder
from .environment import BASE_FILE, DATA_FILE, LOCK_FILE, Environment
from .names import shown


def backup(environment: Environment, folder: Path) -> None:
    """Copy into ``folder``, empty or to be made: the journal and its view, and the snapshot that it continues.

    Raises InvalidRequest where the folder is not empty; JournalUnavailable where the catalog was compacted meanwhile,
    with nothing left behind; OSError.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if any(folder.iterdir()):
        raise InvalidRequest(f"{shown(str(folder))} is not empty", field="folder")
    with contextlib.ExitStack() as undo:
        for name in (BASE_FILE, DATA_FILE, LOCK_FILE):
            undo.callback((folder / name).unlink, missing_ok=True)
        _copy(environment, folder)
        undo.pop_all()
    # a lock file is of use to who has the catalog open
    (folder / LOCK_FILE).unlink(missing_ok=True)
    fsync_folder(folder)
    fsync_folder(folder.absolute().parent)


def _copy(environment: Environment, folder: Path) -> None:
    # the snapshot first: the events behind it are in any later copy of the journal, unless that is compacted again
    base = base_of(environment.path)
    if base is not None:
        with base.open("rb") as source, create_private(folder / BASE_FILE) as out:
            shutil.copyfileobj(source, out)
            out.flush()
            os.fsync(out.fileno())
    environment.copy(folder)
    (folder / DATA_FILE).chmod(PRIVATE)
    fsync_file(folder / DATA_FILE)
    try:
        with contextlib.closing(Environment.open(folder)) as copied, opened_base(copied):
            pass
    except InvalidRequest as error:
        raise JournalUnavailable(
            f"the copy is not whole, as if the catalog had been compacted meanwhile: {error.message}", retry_after_s=1.0
        ) from error
