"""What stands in for LMDB's transaction reads and scans as LMDB does, whatever is known yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.postgres.rows import KnownRows, Page, RowTransaction, UnknownRow

T = TypeVar("T")
KIND = "policies"
KEYS = st.integers(0, 400).map(lambda number: b"%03d" % number)


def answered(stored: dict[bytes, bytes], known: KnownRows, ask: Callable[[], T]) -> T:
    """What ``ask`` comes to once all that it wants to know was fetched."""
    for _ in range(1000):
        try:
            return ask()
        except UnknownRow:
            for _, key in known.wanted_rows:
                known.rows[KIND, key] = stored.get(key)
            for (_, start), count in known.wanted_pages.items():
                rows = sorted((key, value) for key, value in stored.items() if key >= start)
                known.pages[KIND, start] = Page(rows[:count], whole=len(rows) < count)
            known.wanted_rows.clear()
            known.wanted_pages.clear()
    raise AssertionError("it asks forever")


@given(
    stored=st.sets(KEYS, max_size=300),
    writes=st.lists(st.tuples(KEYS, st.booleans(), st.booleans()), max_size=30),
    start=KEYS,
)
def test_a_scan_is_of_what_is_stored_and_what_was_written(
    stored: set[bytes], writes: list[tuple[bytes, bool, bool]], start: bytes
) -> None:
    rows = dict.fromkeys(stored, b"stored")
    model = dict(rows)
    known = KnownRows()
    transaction = RowTransaction(known, 0)
    for key, there, kept in writes:
        if there:
            transaction.put(key, b"written", db=KIND)
        else:
            transaction.delete(key, db=KIND)
        if kept:
            transaction.keep()
            model |= {key: b"written"} if there else {}
            if not there:
                model.pop(key, None)
        else:
            transaction.drop()

    def scan() -> list[tuple[bytes, bytes]]:
        cursor = transaction.cursor(db=KIND)
        return list(cursor.iternext()) if cursor.set_range(start) else []

    expected = sorted((key, value) for key, value in model.items() if key >= start)
    assert answered(rows, known, scan) == expected
    for key in (start, *(key for key, _, _ in writes)):
        assert answered(rows, known, lambda: transaction.get(key, db=KIND)) == model.get(key)  # noqa: B023
    after = {**rows, **transaction.changes.get(KIND, {})}
    assert {key: value for key, value in after.items() if value is not None} == model


def test_what_is_not_kept_in_postgres_is_not_read_from_it() -> None:
    transaction = RowTransaction(KnownRows(), 0)
    transaction.put(b"acme/a", b"route", db="routes")
    transaction.keep()
    assert transaction.changes == {}
    for kind in ("routes", "by_base", "by_label", "journal"):
        with pytest.raises(NotImplementedError):
            transaction.get(b"acme/a", db=kind)
