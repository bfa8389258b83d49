"""A progress bar over bytes, on stderr, so that a command's output stays clean. Silent where nobody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from .output import ERR


@contextmanager
def byte_progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """Yields what to call with (bytes done, bytes in all)."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Progress(*columns, console=ERR, transient=True, disable=not ERR.is_terminal) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def count_progress(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """The same over things that are counted: yields what to call with how many are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=ERR, transient=True, disable=not ERR.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.update(task, completed=done)
