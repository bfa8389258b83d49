"""Running commands against PostgreSQL, a batch to a transaction: the same decisions, the same answers as in LMDB."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from typing import TypeVar

import asyncpg
import msgspec
import uvloop

from wire.events import Event
from wire.outcomes import InvalidRequest, JournalUnavailable, RoostError, StorageFull
from wire.registrar import CollectOrphans, Committed, ReadJournal, Refusal

from .. import inputs
from ..artifacts import RegistrarStore
from ..batch import Batch, BatchAnswer, BatchCommand, Clock, Written, refusal, write
from ..blobs import Swept
from ..checks import ArtifactSizes, WriteCommand
from ..snapshot import Snapshot
from . import journal
from .connection import TROUBLE, Connection, connect, said
from .journal import Done
from .local_view import LocalView
from .prefetch import Prefetch
from .rows import KnownRows, RowTransaction, UnknownRow, as_txn, row_tables

_log = logging.getLogger(__name__)

T = TypeVar("T")

# how long a batch whose connection broke is tried again before its askers are told; a restart takes a second or two
_PATIENCE_S = 5.0
_PAUSE_S = 0.1
_REMEMBERED_S = 3600.0
# what a registrar that died was removing may be named again after this: far longer than a store is waited for
_SWEEP_MOST_S = 1800.0
# longer than any registrar remembers what it saw in the store
_SWEPT_TOLD_S = 60.0


class PostgresLedger:
    """A BatchLedger over the journal at ``url``; reads of the journal are answered by ``view``, this host's own.

    One thread at a time uses it; each call runs the connection's event loop for as long as it lasts.
    """

    def __init__(self, url: str, store: RegistrarStore, view: LocalView, *, now_ms: Clock | None = None) -> None:
        self._url = url
        self._store = store
        self._view = view
        self._now_ms = now_ms
        self._tables = row_tables()
        self._connection: Connection | None = None
        self._swept: frozenset[tuple[str, str]] = frozenset()
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def open(self) -> None:
        """Connect, and make or migrate the schema. A database that is away is only logged: it may come.

        Raises JournalUnavailable where waiting for it would not help.
        """
        try:
            self._runner.run(self._connected())
        except RoostError:
            raise
        except TROUBLE as error:
            _log.warning("PostgreSQL can't be reached yet, and nothing can be written: %s", said(error))

    def close(self) -> None:
        if self._connection is not None:
            self._runner.run(self._hang_up(self._connection))
        self._runner.close()

    def run(self, commands: Sequence[BatchCommand]) -> Batch:
        """Run what writes, in order, in one transaction; then what reads.

        With PostgreSQL away, everything that would have written is refused and the refusal says whether it may have
        had its effect all the same. Events are announced by the follower, and so the batch brings none.
        """
        writes = [command for command in commands if not isinstance(command, ReadJournal)]
        written = iter(self._runner.run(self._write(writes)) if writes else ())
        answers: list[BatchAnswer] = [
            self._view.slice(command) if isinstance(command, ReadJournal) else next(written) for command in commands
        ]
        return Batch(answers, [])

    def sweep(self, command: CollectOrphans) -> Iterator[Swept]:
        """Clean the store up in short steps, none of which waits for the store under the journal's lock.

        Raises InvalidRequest, ArtifactUnavailable and JournalUnavailable.
        """
        inputs.check_age(command)
        return self._store.sweep_by_folder(self._orphans, command.older_than_s)

    def housekeep(self) -> None:
        """Forget what commands came to that nobody can still be asking for."""
        self._view.housekeep()
        try:
            self._runner.run(self._forget())
        except TROUBLE as error:
            self._lost(error)

    def position(self) -> int:
        """The newest sequence number of this host's view."""
        return self._view.position()

    async def _write(self, commands: Sequence[WriteCommand]) -> list[Written]:
        """Each command's answer. Tried again with the same ids, a batch that was committed finds its answers."""
        identified = [_identified(command) for command in commands]
        deadline = time.monotonic() + _PATIENCE_S
        attempt = _Attempt()
        while True:
            try:
                return await self._transact(identified, attempt)
            except RoostError as error:
                return _refused(error, len(commands), attempt)
            except asyncpg.DiskFullError as error:
                self._lost(error)
                return _refused(StorageFull("PostgreSQL has no room for the journal"), len(commands), attempt)
            except TROUBLE as error:
                self._lost(error)
                if not attempt.worth_another or time.monotonic() >= deadline:
                    reason = JournalUnavailable(f"PostgreSQL can't be written: {said(error)}", retry_after_s=1.0)
                    return _refused(reason, len(commands), attempt)
                await asyncio.sleep(_PAUSE_S)

    async def _transact(self, commands: Sequence[WriteCommand], attempt: _Attempt) -> list[Written]:
        attempt.connected = False
        connection = await self._connected()
        attempt.connected = True
        async with connection.transaction(isolation="read_committed"):
            head = await journal.lock(connection)
            before = await journal.done_before(connection, _possible_ids(commands))
            now_ms = self._now_ms or (lambda: head.now_ms)
            known, store = KnownRows(), _Store(self._store, head.sweeping)
            if swept := head.swept - self._swept:
                self._store.forget(digest for _, digest in swept)
            self._swept = head.swept
            while True:
                await self._prefetch(connection, commands, known)
                outcome = _Outcome(RowTransaction(known, head.position), before)
                for command in commands:
                    # of each its own: a snapshot may remember what an interrupted command would have written
                    outcome.run(command, Snapshot(as_txn(outcome.transaction), self._tables), store, now_ms)
                if known.complete:
                    break
                await journal.fetch(connection, known)
            if outcome.events:
                await journal.write(connection, outcome.events, outcome.transaction.changes, known)
                await journal.remember(connection, outcome.done)
                attempt.in_doubt = True
        attempt.in_doubt = False
        return outcome.answers

    async def _prefetch(self, connection: Connection, commands: Sequence[WriteCommand], known: KnownRows) -> None:
        """Fetch what the commands will read, as far as it can be told from what is known: with that, a few rounds."""
        prefetch = Prefetch(Snapshot(as_txn(RowTransaction(known, 0)), self._tables), known)
        while True:
            for command in commands:
                prefetch.ask(command)
            if known.complete:
                return
            await journal.fetch(connection, known)

    @contextlib.contextmanager
    def _orphans(self, digests: Sequence[str]) -> Iterator[frozenset[str]]:
        """Nothing is held while they are removed: a row for each tells all registrars, in whose decisions it counts."""
        sweep = uuid.uuid4().hex
        unnamed = self._asked(self._begin_sweep(sweep, digests))
        try:
            yield frozenset(unnamed)
        finally:
            if unnamed:
                self._asked(self._end_sweep(sweep))

    def _asked(self, work: Coroutine[object, object, T]) -> T:
        """What PostgreSQL answers. Raises JournalUnavailable."""
        try:
            return self._runner.run(work)
        except RoostError:
            raise
        except TROUBLE as error:
            self._lost(error)
            raise JournalUnavailable(f"PostgreSQL can't be reached: {said(error)}", retry_after_s=1.0) from error

    async def _begin_sweep(self, sweep: str, digests: Sequence[str]) -> list[str]:
        connection = await self._connected()
        async with connection.transaction(isolation="read_committed"):
            await journal.lock(connection)
            unnamed = await journal.unnamed(connection, digests)
            if unnamed:
                await journal.begin_sweep(connection, sweep, unnamed, _SWEEP_MOST_S)
        return unnamed

    async def _end_sweep(self, sweep: str) -> None:
        await journal.end_sweep(await self._connected(), sweep, _SWEPT_TOLD_S)

    async def _hang_up(self, connection: Connection) -> None:
        connection.terminate()

    async def _forget(self) -> None:
        await journal.forget(await self._connected(), _REMEMBERED_S)

    async def _connected(self) -> Connection:
        if self._connection is None or self._connection.is_closed():
            self._connection = await connect(self._url)
        return self._connection

    def _lost(self, error: BaseException) -> None:
        """Never use a connection again that something went wrong on."""
        if self._connection is not None:
            _log.warning("the connection to PostgreSQL is given up: %s", said(error))
            self._connection.terminate()
            self._connection = None


class _Attempt:
    """How far the tries at one batch have come."""

    def __init__(self) -> None:
        self.connected = False
        """The last one had a connection: what failed since may be mended by another."""
        self.in_doubt = False
        """A commit was sent and not confirmed."""

    @property
    def worth_another(self) -> bool:
        return self.connected or self.in_doubt


class _Outcome:
    """What the commands of a batch come to over the rows that are known."""

    def __init__(self, transaction: RowTransaction, before: dict[str, Done]) -> None:
        self.transaction = transaction
        self.answers: list[Written] = []
        self.events: list[Event] = []
        self.done: dict[str, Done] = {}
        self._before = before

    def run(self, command: WriteCommand, view: Snapshot, store: ArtifactSizes, now_ms: Clock) -> None:
        """Decide on one command, unless it was run already. One that asks for an unknown row comes to nothing yet."""
        asked = _hash(command)
        known = self._before.get(command.command_id) or self.done.get(command.command_id)
        if known is not None:
            self.answers.append(known.answer if known.command == asked else _REUSED)
            return
        events: list[Event] = []
        try:
            answer = write(command, view, store, now_ms, events)
        except UnknownRow:
            self.transaction.drop()
            return
        self.transaction.keep()
        self.answers.append(answer)
        self.events += events
        if isinstance(answer, Committed) and answer.changed:
            self.done[command.command_id] = Done(asked, answer)


class _Store:
    """The store in one transaction: asked once for each artifact, and without what registrars are ``sweeping``."""

    def __init__(self, store: ArtifactSizes, sweeping: frozenset[str]) -> None:
        self._store = store
        self._sweeping = sweeping
        self._sizes: dict[str, int | None] = {}

    def size(self, digest: str) -> int | None:
        if digest not in self._sizes:
            self._sizes[digest] = self._store.size(digest)
        return self._sizes[digest]

    def removing(self, digest: str) -> bool:
        return digest in self._sweeping or self._store.removing(digest)


_REUSED = refusal(InvalidRequest("command_id was another command's: each needs its own", field="command_id"))


def _identified(command: WriteCommand) -> WriteCommand:
    """With an id, under which this command is found again should its commit not be confirmed."""
    return command if command.command_id else msgspec.structs.replace(command, command_id=uuid.uuid4().hex)


def _possible_ids(commands: Sequence[WriteCommand]) -> list[str]:
    """Those that can have been taken before: PostgreSQL would refuse the whole batch for a text that is none to it."""
    return [command.command_id for command in commands if inputs.may_be_command_id(command.command_id)]


def _hash(command: WriteCommand) -> bytes:
    """Of what was asked, without what nodes happened to hold then: sent again, a request says otherwise."""
    if getattr(command, "in_use", ()):
        command = msgspec.structs.replace(command, in_use=())
    return hashlib.blake2b(msgspec.msgpack.encode(command), digest_size=16).digest()


def _refused(error: RoostError, count: int, attempt: _Attempt) -> list[Written]:
    effect = (
        "the command may have had its effect or not; asked again with the same command_id it is answered with what "
        "it came to"
        if attempt.in_doubt
        else "nothing was changed"
    )
    told: Refusal = msgspec.structs.replace(
        refusal(error), message=f"{error.message}: {effect}", retry_after_s=error.retry_after_s or 1.0
    )
    return [told] * count
