"""``roost logs``: what the processes and engines of this host wrote."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from wire.outcomes import NotFound

from .output import tell
from .session import StateDir, session

POLL_S = 0.2
BYTES_A_LINE = 400


def register(app: typer.Typer) -> None:
    app.command("logs")(logs)


def logs(
    context: typer.Context,
    process: Annotated[str, typer.Argument(help="One process or engine.  [default: all]")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0)] = 20,
    state_dir: StateDir = None,
) -> None:
    """Show the last lines of the logs."""
    folder = session(context).layout(state_dir).logs
    there = sorted(folder.glob("*.log")) if folder.is_dir() else []
    chosen = [file for file in there if process in ("", file.stem, file.stem.removeprefix("engine-"))]
    if not chosen:
        names = ", ".join(file.stem for file in there) or "none yet: start the mesh with `roost up`"
        raise NotFound(f"no log of {process or 'anything'} in {folder}; logs there: {names}", field="process")
    tails = [_Tail(file, prefix=len(chosen) > 1) for file in chosen]
    for tail in tails:
        tail.last(lines)
    with contextlib.suppress(KeyboardInterrupt):
        while follow:
            moved = [tail.rest() for tail in tails]
            if not any(moved):
                time.sleep(POLL_S)


class _Tail:
    """Where we are in a log file; one that was moved away is opened anew, one that was emptied read from its start."""

    def __init__(self, path: Path, *, prefix: bool) -> None:
        self._path = path
        self._prefix = f"{path.stem:12} | " if prefix else ""
        self._file: BinaryIO = path.open("rb")

    def last(self, count: int) -> None:
        size = self._file.seek(0, 2)
        self._file.seek(max(0, size - (count + 1) * BYTES_A_LINE))
        for line in self._file.read().splitlines()[-count:] if count else ():
            self._show(line)

    def rest(self) -> bool:
        """Show what came since. Returns whether there was anything."""
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
        data = self._file.read()
        for line in data.splitlines():
            self._show(line)
        if not data and self._path.exists() and self._path.stat().st_ino != self._inode():
            self._file.close()
            self._file = self._path.open("rb")
        return bool(data)

    def _inode(self) -> int:
        return os.fstat(self._file.fileno()).st_ino

    def _show(self, line: bytes) -> None:
        tell((self._prefix, "cyan"), line.decode(errors="replace"))
