"""Standing in for an LMDB transaction, so that commands are decided and events applied by the very same code.

What is asked for and not known is noted and interrupts the one who asks; the rows are fetched, for all commands of a
batch at once, and the batch is tried again. A round tells the first row that a command lacks and no more, so what
commands read is asked for beforehand (prefetch.py): a batch then takes a few rounds, whatever its size and however many
revisions a command of it concerns. Nothing here touches PostgreSQL.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import cast

import lmdb

from ..layout import Tables, Txn, number_key

JOURNAL = "journal"
# what follows from the other rows and no decision reads
_DERIVED = frozenset({"routes", "by_base", "by_label"})
PAGE_ROWS = 64

Key = tuple[str, bytes]
Value = bytes | None
Changes = dict[str, dict[bytes, Value]]


class UnknownRow(Exception):
    """A row that has to be fetched first."""


class Page:
    """The first rows of a database from some key on; ``whole`` where there are no others."""

    __slots__ = ("keys", "values", "whole")

    def __init__(self, rows: Sequence[tuple[bytes, bytes]], *, whole: bool) -> None:
        self.keys = [key for key, _ in rows]
        self.values = [value for _, value in rows]
        self.whole = whole

    def knows(self, start: bytes) -> bool:
        """Whether the first row at ``start`` or after it, or that there is none, can be told; if the page begins there
        or before."""
        return self.whole or (bool(self.keys) and self.keys[-1] >= start)


class KnownRows:
    """What one PostgreSQL transaction has read so far, and what it should read next."""

    def __init__(self) -> None:
        self.rows: dict[Key, Value] = {}
        self.pages: dict[Key, Page] = {}
        self.wanted_rows: set[Key] = set()
        self.wanted_pages: dict[Key, int] = {}
        """With the number of rows."""
        self.wanted_prefixes: set[Key] = set()

    @property
    def complete(self) -> bool:
        """Whether nothing was asked for that is not known."""
        return not self.wanted_rows and not self.wanted_pages and not self.wanted_prefixes

    def row(self, kind: str, key: bytes) -> Value:
        try:
            return self.rows[kind, key]
        except KeyError:
            self.wanted_rows.add((kind, key))
            raise UnknownRow from None

    def page(self, kind: str, start: bytes) -> Page:
        try:
            return self.pages[kind, start]
        except KeyError:
            self.want_page(kind, start, PAGE_ROWS)
            raise UnknownRow from None

    def want_page(self, kind: str, start: bytes, count: int) -> None:
        """The first ``count`` rows from ``start`` on, unless they are known."""
        if (kind, start) not in self.pages:
            self.wanted_pages[kind, start] = max(count, self.wanted_pages.get((kind, start), 0))

    def want_prefix(self, kind: str, prefix: bytes) -> None:
        """All rows whose keys begin with ``prefix``, and the one behind them; unless they are known."""
        if (kind, prefix) not in self.pages:
            self.wanted_prefixes.add((kind, prefix))


class RowTransaction:
    """What ``layout.Table`` uses of a transaction. Writes stay here, in ``changes``, for the caller to carry out.

    A command's writes count once ``keep`` is called; ``drop`` forgets them.
    """

    def __init__(self, known: KnownRows, position: int) -> None:
        self.changes: Changes = {}
        self._command: Changes = {}
        self._known = known
        self._position = self._kept_position = position

    def keep(self) -> None:
        for kind, rows in self._command.items():
            self.changes.setdefault(kind, {}).update(rows)
        self._command = {}
        self._kept_position = self._position

    def drop(self) -> None:
        self._command = {}
        self._position = self._kept_position

    def get(self, key: bytes, *, db: str) -> Value:
        for changes in (self._command, self.changes):
            rows = changes.get(db)
            if rows is not None and key in rows:
                return rows[key]
        _must_be_kept(db)
        return self._known.row(db, key)

    def put(self, key: bytes, value: bytes, *, db: str, append: bool = False) -> bool:
        if db == JOURNAL:
            self._position = int.from_bytes(key, "big")
        elif db not in _DERIVED:
            self._command.setdefault(db, {})[key] = value
        return True

    def delete(self, key: bytes, *, db: str) -> bool:
        if db not in _DERIVED:
            self._command.setdefault(db, {})[key] = None
        return True

    def cursor(self, *, db: str) -> RowCursor:
        return RowCursor(self, db)

    @property
    def position(self) -> int:
        return self._position

    def next_row(self, kind: str, start: bytes) -> tuple[bytes, bytes] | None:
        """The first row at ``start`` or after it, as it stands with what was written here."""
        while True:
            candidates = [found for found in (self._known_next(kind, start), self._written_next(kind, start)) if found]
            if not candidates:
                return None
            key = min(candidates)
            value = self.get(key, db=kind)
            if value is not None:
                return key, value
            start = key + b"\0"

    def _known_next(self, kind: str, start: bytes) -> bytes | None:
        _must_be_kept(kind)
        for (page_kind, page_start), page in self._known.pages.items():
            if page_kind == kind and page_start <= start and page.knows(start):
                index = bisect.bisect_left(page.keys, start)
                if index == len(page.keys):
                    return None
                self._known.rows.setdefault((kind, page.keys[index]), page.values[index])
                return page.keys[index]
        self._known.page(kind, start)
        return None

    def _written_next(self, kind: str, start: bytes) -> bytes | None:
        written = {**self.changes.get(kind, {}), **self._command.get(kind, {})}
        return min((key for key in written if key >= start), default=None)


class RowCursor:
    """What ``layout.Table`` uses of a cursor."""

    def __init__(self, txn: RowTransaction, kind: str) -> None:
        self._txn = txn
        self._kind = kind
        self._start = b""

    def first(self) -> bool:
        return self.set_range(b"")

    def set_range(self, start: bytes) -> bool:
        self._start = start
        return self._txn.next_row(self._kind, start) is not None

    def iternext(self) -> Iterator[tuple[bytes, bytes]]:
        start = self._start
        while (found := self._txn.next_row(self._kind, start)) is not None:
            yield found
            start = found[0] + b"\0"

    def last(self) -> bool:
        """Of the journal alone, whose last key is the position."""
        if self._kind != JOURNAL:
            raise NotImplementedError(f"the last row of {self._kind}")
        return self._txn.position > 0

    def key(self) -> bytes:
        return number_key(self._txn.position)


class _Names:
    """Stands for the environment where tables are opened: a database's handle is its name."""

    def open_db(self, name: bytes, *, txn: object = None, create: bool = True) -> str:
        return name.decode()


def row_tables() -> Tables:
    """The tables of the layout, over row transactions."""
    return Tables.open(cast("lmdb.Environment", _Names()))


def as_txn(transaction: RowTransaction) -> Txn:
    """``transaction`` as the type that it stands in for."""
    return cast("Txn", transaction)


def _must_be_kept(kind: str) -> None:
    if kind == JOURNAL or kind in _DERIVED:
        raise NotImplementedError(f"{kind} is not among the rows that decisions may read")
