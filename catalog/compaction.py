"""Compaction: a snapshot stands for the older events of the journal, which then go.

The snapshot is complete and durable before the first event is removed, and events go from the oldest on: wherever it is
killed, replaying the snapshot and the events behind it makes the view.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from wire.outcomes import InvalidRequest

from .environment import BASE_FILE, Environment
from .layout import number_key
from .snapshot import Snapshot
from .stream import Progress, Reader, write_base

_EVENTS_A_TRANSACTION = 20_000


class Compacted(msgspec.Struct, frozen=True):
    """``position`` of the snapshot, and how many events went."""

    position: int
    removed: int


def base_of(catalog_dir: Path) -> Path | None:
    """The snapshot that the journal of this catalog continues, where it was compacted."""
    file = catalog_dir / BASE_FILE
    return file if file.exists() else None


@contextlib.contextmanager
def opened_base(environment: Environment) -> Iterator[Reader | None]:
    """The same, opened. Raises InvalidRequest where it is missing or is not the one that the journal continues."""
    file = base_of(environment.path)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(file.open("rb")) if file is not None else None
        _must_continue(environment, source)
        yield Reader(source) if source is not None else None


def _must_continue(environment: Environment, source: BinaryIO | None) -> None:
    """The journal must have the snapshot's newest event, the very same; without a snapshot, its own first one."""
    reader = Reader(source) if source is not None else None
    position = reader.header.position if reader is not None else 0
    newest = next(reader.entries(), None) if reader is not None else None
    if source is not None:
        source.seek(0)
    first = first_event(environment)
    with environment.begin() as txn:
        raw = txn.get(number_key(position), db=environment.tables.journal.handle)
    if first > max(position, 1):
        raise InvalidRequest(f"the journal begins at event {first}, and the snapshot {BASE_FILE} before it is missing")
    if position and newest != ("journal", number_key(position), raw):
        raise InvalidRequest(
            f"{BASE_FILE} is not of this journal: its newest event, {position}, is another one there or missing"
        )


def compact(environment: Environment, progress: Progress = lambda count: None) -> Compacted:
    """Replace all events so far but the newest, which says what the position is. For who may write the catalog alone.

    A follower that asks for an older event is told to begin from a snapshot. Raises OSError and lmdb.Error.
    """
    position = write_base(environment, progress)
    return Compacted(position, _remove_before(environment, position, progress))


def _remove_before(environment: Environment, position: int, progress: Callable[[int], object]) -> int:
    removed = 0
    journal = environment.tables.journal
    while True:
        with environment.begin(write=True) as txn:
            cursor = txn.cursor(db=journal.handle)
            keys = list(islice(cursor.iternext(values=False), _EVENTS_A_TRANSACTION)) if cursor.first() else []
            older = [key for key in keys if key < number_key(position)]
            for key in older:
                journal.delete(txn, key)
        removed += len(older)
        progress(removed)
        if len(older) < _EVENTS_A_TRANSACTION:
            return removed


def first_event(environment: Environment) -> int:
    """The number of the oldest event that the journal still has; 0 for an empty journal."""
    with environment.begin() as txn:
        oldest = next(Snapshot(txn, environment.tables).journal(after=0), None)
    return 0 if oldest is None else oldest.seq
