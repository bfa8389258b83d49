"""Tables whose rows wait in memory until the end of a batch: a policy that changes five times is written once.

Rows are then written in the order of their keys, which touches each page once and fills pages better.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import TypeVar

from .layout import Table, Tables, Txn

R = TypeVar("R")


class _Gone(enum.Enum):
    GONE = enum.auto()


class BufferedTable(Table[R]):
    """``inner`` as it will be once ``flush`` was called; ``first`` is written before it, for its rows refer to those.

    Belongs to one write transaction.
    """

    __slots__ = ("_changed", "_first", "_inner", "_known")

    def __init__(self, inner: Table[R], first: BufferedTable[object] | None = None) -> None:
        self.name = inner.name
        self.handle = inner.handle
        self._inner = inner
        self._first = first
        self._known: dict[bytes, R | None] = {}
        self._changed: dict[bytes, R | _Gone] = {}

    def get(self, txn: Txn, key: bytes) -> R | None:
        known = self._known.get(key, _Gone.GONE)
        if isinstance(known, _Gone):
            known = self._known[key] = self._inner.get(txn, key)
        return known

    def put(self, txn: Txn, key: bytes, record: R, *, append: bool = False) -> None:
        if isinstance(self._changed.get(key), _Gone):
            # it goes and comes again: what a table does when a row goes must have happened
            self._inner.delete(txn, key)
        self._known[key] = self._changed[key] = record

    def delete(self, txn: Txn, key: bytes) -> None:
        record = self._changed.get(key, _Gone.GONE)
        if not isinstance(record, _Gone):
            # what a table does when a row goes, it does for rows that were there
            self._inner.put(txn, key, record)
        self._known[key] = None
        self._changed[key] = _Gone.GONE

    def last_key(self, txn: Txn) -> bytes | None:
        self.flush(txn)
        return self._inner.last_key(txn)

    def scan(self, txn: Txn, *, prefix: bytes = b"", after: bytes | None = None) -> Iterator[tuple[bytes, R]]:
        self.flush(txn)
        return self._inner.scan(txn, prefix=prefix, after=after)

    def flush(self, txn: Txn) -> None:
        """Write what changed. Raises lmdb.Error."""
        if self._first is not None:
            self._first.flush(txn)
        rows = []
        for key in sorted(self._changed):
            record = self._changed[key]
            if isinstance(record, _Gone):
                self._inner.delete(txn, key)
            else:
                rows.append((key, record))
        self._inner.put_all(txn, rows)
        self._changed.clear()


def buffered(tables: Tables) -> Tables:
    """The same tables for one write transaction, buffered where rows are many."""
    artifacts = BufferedTable(tables.artifacts)
    return dataclasses.replace(
        tables,
        bases=BufferedTable(tables.bases),
        policies=BufferedTable(tables.policies),
        revisions=BufferedTable(tables.revisions, first=artifacts),  # type: ignore[arg-type]
        artifacts=artifacts,
        routes=BufferedTable(tables.routes),
        by_base=BufferedTable(tables.by_base),
        forwards=BufferedTable(tables.forwards),
    )


def flush(tables: Tables, txn: Txn) -> None:
    """Write what waits. Raises lmdb.Error."""
    for table in tables.named().values():
        if isinstance(table, BufferedTable):
            table.flush(txn)
