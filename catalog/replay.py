"""Rebuilding the view from the journal, and comparing: replay equals the view, byte for byte."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path

import msgspec

from wire.events import Event
from wire.outcomes import JournalUnavailable

from .apply import append_all
from .compaction import opened_base
from .environment import Environment
from .layout import Txn, number_key
from .snapshot import Snapshot
from .stream import load

_EVENTS_A_TRANSACTION = 10_000
# address space of a scratch copy; the file takes what is written
_SCRATCH_BYTES = 1 << 40
_SHOWN = 20

Row = tuple[str, bytes, bytes]


class Replay(msgspec.Struct, frozen=True):
    """What a check found. ``differences`` are sentences, the first few of them; none: the view is the journal's."""

    events: int
    rows: int
    differences: tuple[str, ...]


def check_catalog(catalog_dir: Path, scratch_dir: Path | None = None) -> Replay:
    """Rebuild the view of a catalog in a scratch folder and compare. The registrar may run meanwhile.

    Raises JournalUnavailable where the catalog can't be opened, or its journal has a gap or contradicts itself.
    """
    with contextlib.closing(Environment.open(catalog_dir)) as environment:
        return check_environment(environment, scratch_dir)


def check_environment(environment: Environment, scratch_dir: Path | None = None) -> Replay:
    """The same for an environment that is open already.

    Raises InvalidRequest too, where the snapshot that the journal continues is damaged, missing or another one.
    """
    with (
        opened_base(environment) as base,
        tempfile.TemporaryDirectory(prefix="replay-", dir=scratch_dir) as folder,
        contextlib.closing(Environment.create(Path(folder), map_bytes=_SCRATCH_BYTES, durable=False)) as scratch,
        environment.begin() as txn,
    ):
        source = Snapshot(txn, environment.tables)
        position = load(base, scratch).position if base is not None else 0
        events = rebuild(source, scratch, after=position)
        with scratch.begin() as rebuilt_txn:
            rows, differences = _compare(_dump(environment, txn, position), _dump(scratch, rebuilt_txn, position))
    return Replay(events, rows, tuple(differences))


def rebuild(source: Snapshot, into: Environment, *, after: int = 0) -> int:
    """Append and apply the events of ``source`` above ``after`` to an environment at that position; how many."""
    count = rebuild_from(source.journal(after=after), into)
    if after + count != source.position():
        raise JournalUnavailable(f"the journal is damaged: {count} events end at position {source.position()}")
    return count


def rebuild_from(events: Iterator[Event], into: Environment) -> int:
    """Append and apply ``events`` to an environment that has those before them; how many there were."""
    count = 0
    while batch := list(islice(events, _EVENTS_A_TRANSACTION)):
        with into.begin(write=True) as txn, Snapshot.writing(txn, into.tables) as view:
            append_all(view, batch)
        count += len(batch)
    return count


def _dump(environment: Environment, txn: Txn, base: int) -> Iterator[Row]:
    """Everything but the events before ``base``."""
    for name, table in environment.tables.named().items():
        cursor = txn.cursor(db=table.handle)
        start = number_key(base) if name == "journal" else b""
        if cursor.set_range(start) if start else cursor.first():
            for key, raw in cursor.iternext():
                yield name, key, raw


def _compare(ours: Iterator[Row], rebuilt: Iterator[Row]) -> tuple[int, list[str]]:
    """Rows seen, and what differs: up to the first place where one side has a row that the other has not."""
    rows = 0
    differences: list[str] = []
    for row, other in zip_longest(ours, rebuilt):
        rows += 1
        if row == other:
            continue
        if row is None or other is None or row[:2] != other[:2]:
            differences.append(f"row {rows}: the view has {_shown(row)}, the journal makes {_shown(other)}")
            break
        differences.append(f"{_shown(row)} is not what the journal makes of it")
        if len(differences) == _SHOWN:
            break
    return rows, differences


def _shown(row: Row | None) -> str:
    return "nothing" if row is None else f"{row[0]} {row[1].decode('utf-8', 'backslashreplace')!a}"
