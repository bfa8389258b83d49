"""This host's LMDB, which a follower fills and nobody else writes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import lmdb

from wire.events import Event
from wire.outcomes import JournalUnavailable, StorageFull
from wire.registrar import JournalSlice, ReadJournal, Refusal

from ..apply import append_all
from ..batch import read_journal
from ..environment import Environment
from ..layout import number_key
from ..ledger import disk_is_full
from ..snapshot import Snapshot


class LocalView:
    """Used from several threads, which take turns: a map must not grow under another's transaction."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._tables = environment.tables
        self._turn = threading.Lock()

    def apply(self, events: Sequence[Event]) -> None:
        """Append and apply ``events`` in one transaction, and with it the position.

        Raises StorageFull where there is no room, and JournalUnavailable where the events don't follow what is there
        or the view can't be written; nothing is applied then.
        """
        with self._turn:
            while True:
                try:
                    with (
                        self._environment.begin(write=True) as txn,
                        Snapshot.writing(txn, self._environment.tables) as view,
                    ):
                        append_all(view, events)
                    return
                except lmdb.MapFullError:
                    self._environment.grow()
                except lmdb.Error as error:
                    if disk_is_full(error, self._environment.path):
                        raise StorageFull("there is no room for this host's view of the catalog") from error
                    raise JournalUnavailable(f"this host's view of the catalog can't be written: {error}") from error

    def position(self) -> int:
        """The newest sequence number applied."""
        with self._turn, self._environment.begin() as txn:
            return Snapshot(txn, self._tables).position()

    def event(self, seq: int) -> Event | None:
        with self._turn, self._environment.begin() as txn:
            return self._tables.journal.get(txn, number_key(seq))

    def slice(self, command: ReadJournal) -> JournalSlice | Refusal:
        with self._turn, self._environment.begin() as txn:
            return read_journal(command, Snapshot(txn, self._tables))

    def housekeep(self) -> None:
        with self._turn:
            self._environment.drop_dead_readers()
