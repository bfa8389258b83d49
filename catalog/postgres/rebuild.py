"""Making the records anew from the journal, within the caller's transaction: for another layout of theirs."""

from __future__ import annotations

from ..apply import append
from ..snapshot import Snapshot
from . import journal
from .connection import Connection
from .rows import KnownRows, RowTransaction, UnknownRow, as_txn, row_tables


async def rebuild_records(connection: Connection) -> None:
    """Raises JournalUnavailable where the journal contradicts itself or does not begin at its first event."""
    await connection.execute("TRUNCATE roost.records")
    tables = row_tables()
    position = 0
    while page := await journal.events_after(connection, position):
        known = KnownRows()
        transaction = RowTransaction(known, position)
        for event in journal.decode(page):
            while True:
                try:
                    append(Snapshot(as_txn(transaction), tables), event)
                except UnknownRow:
                    transaction.drop()
                    await journal.fetch(connection, known)
                else:
                    transaction.keep()
                    break
        await journal.write(connection, (), transaction.changes, known)
        position = transaction.position
