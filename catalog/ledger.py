"""Running commands against the environment, a batch to a transaction: the registrar without its sockets."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lmdb

from wire.events import Event
from wire.outcomes import JournalUnavailable, StorageFull
from wire.registrar import CollectOrphans, ReadJournal

from . import inputs
from .artifacts import RegistrarStore
from .batch import Batch, BatchAnswer, BatchCommand, clock_ms, read_journal, refusal, write
from .blobs import Swept
from .environment import Environment
from .layout import Txn
from .snapshot import Snapshot

_FULL_CODES = frozenset({errno.ENOSPC, errno.EDQUOT})
# LMDB reports a write cut short as EIO: on a disk with less than this left, the disk being full is the reason
_FULL_BYTES = 1 << 20


class Ledger:
    """Owns the environment's write side. One thread uses it.

    ``commit`` makes a transaction durable before it returns: an answer exists only after it did.
    """

    def __init__(
        self,
        environment: Environment,
        store: RegistrarStore,
        *,
        now_ms: Callable[[], int] = clock_ms,
        commit: Callable[[Txn], None] = lmdb.Transaction.commit,
    ) -> None:
        self._environment = environment
        self._store = store
        self._now_ms = now_ms
        self._commit = commit

    def run(self, commands: Sequence[BatchCommand]) -> Batch:
        """Run what writes, in order, in one transaction, each command seeing those before it; then what reads.

        A command that is refused leaves nothing. With the disk full, everything that would have written is refused and
        nothing is written. Raises JournalUnavailable where the journal can't be trusted any more: the process must end.
        """
        while True:
            try:
                return self._attempt(commands)
            except lmdb.MapFullError:
                self._grow()
            except lmdb.Error as error:
                if not disk_is_full(error, self._environment.path):
                    raise JournalUnavailable(f"the journal can't be written: {error}") from error
                full = refusal(StorageFull("there is no room for the journal: nothing was changed", retry_after_s=30.0))
                return self._finish(commands, [full] * len(commands), [])

    def sweep(self, command: CollectOrphans) -> Iterator[Swept]:
        """Clean the store up, a folder at each step; batches may run between steps.

        No publish can come between the look at the catalog and the removal: it would have to run on this very thread,
        and what a store removes across steps counts as absent for it.
        Raises InvalidRequest and ArtifactUnavailable.
        """
        inputs.check_age(command)
        return self._store.sweep_by_folder(self._orphans, command.older_than_s)

    def housekeep(self) -> None:
        """Now and then: what killed readers left behind would keep old pages from reuse."""
        self._environment.drop_dead_readers()

    def position(self) -> int:
        """The newest sequence number of the journal."""
        with self._environment.begin() as txn:
            return Snapshot(txn, self._environment.tables).position()

    def _grow(self) -> None:
        try:
            self._environment.grow()
        except lmdb.Error as error:
            raise JournalUnavailable(f"the journal's map can't grow: {error}") from error

    @contextlib.contextmanager
    def _orphans(self, digests: Sequence[str]) -> Iterator[frozenset[str]]:
        with self._environment.begin() as txn:
            view = Snapshot(txn, self._environment.tables)
            unnamed = frozenset(digest for digest in digests if view.artifact(digest) is None)
        yield unnamed

    def _attempt(self, commands: Sequence[BatchCommand]) -> Batch:
        events: list[Event] = []
        txn = self._environment.begin(write=True)
        try:
            with Snapshot.writing(txn, self._environment.tables) as view:
                written = [self._written(command, view, events) for command in commands]
            self._commit(txn)
        finally:
            # nothing, once it is committed
            txn.abort()
        return self._finish(commands, written, events)

    def _written(self, command: BatchCommand, view: Snapshot, events: list[Event]) -> BatchAnswer | None:
        """The answer to a command that writes; None for one that reads."""
        if isinstance(command, ReadJournal):
            return None
        return write(command, view, self._store, self._now_ms, events)

    def _finish(
        self, commands: Sequence[BatchCommand], written: Sequence[BatchAnswer | None], events: list[Event]
    ) -> Batch:
        """Answer the reads, from what is committed."""
        answers: list[BatchAnswer] = []
        with self._environment.begin() as txn:
            view = Snapshot(txn, self._environment.tables)
            for command, answer in zip(commands, written, strict=True):
                if isinstance(command, ReadJournal):
                    answers.append(read_journal(command, view))
                elif answer is not None:
                    answers.append(answer)
        return Batch(answers, events)


def disk_is_full(error: lmdb.Error, folder: Path) -> bool:
    """Whether what LMDB could not do in ``folder`` was for want of room."""
    # errors that come from the binding and not from the library carry no code
    code = getattr(error, "code", 0)
    if code in _FULL_CODES:
        return True
    room = os.statvfs(folder)
    return code == errno.EIO and room.f_bavail * room.f_frsize < _FULL_BYTES
