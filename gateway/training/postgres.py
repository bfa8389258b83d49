"""The journal of a fleet: it lies in PostgreSQL, and each host's tables are a copy that reads are answered from.

A training service is known by its name. One process at a time has it: who opens it holds a lock for as long as it is
connected, and leaves a mark that every later commit is bound to, so that a process which has lost the lock without
noticing can write nothing. A commit is PostgreSQL's first and the copy's then. A copy that is not at PostgreSQL's mark
and position is made anew.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import asyncpg
import lmdb
import msgspec
import uvloop

from catalog.postgres.connection import TROUBLE, Connection, reach, said
from wire.outcomes import JournalUnavailable, RoostError, StorageFull

from .store import COPY_KEY, LAYOUT, Store, Txn

_log = logging.getLogger(__name__)

T = TypeVar("T")

# how long a commit whose connection broke is tried again; a restart of PostgreSQL takes a second or two
_PATIENCE_S = 5.0
_PAUSE_S = 0.1
_ROWS_AT_ONCE = 100
_LOCK_CLASS = 0x726F7374
_TABLES = """
    CREATE TABLE roost_training.services (
        name text COLLATE "C" PRIMARY KEY,
        layout integer NOT NULL,
        holder text NOT NULL,
        position bigint NOT NULL
    );
    CREATE TABLE roost_training.records (
        service text COLLATE "C" NOT NULL REFERENCES roost_training.services,
        kind text COLLATE "C" NOT NULL,
        key bytea NOT NULL,
        record bytea NOT NULL,
        PRIMARY KEY (service, kind, key)
    );
"""

# table and key to the record, None where it was deleted
_Writes = dict[tuple[str, bytes], bytes | None]


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """Where a journal is: after commit ``position``, and ``holder``'s, which each opening makes up for itself."""

    holder: str
    position: int


class _Held(JournalUnavailable):
    """Another connection has the service's lock: another process', or one that PostgreSQL has not missed yet."""


class _Attempt(NamedTuple):
    writes: _Writes
    mark: Mark


class _Noted:
    """A write transaction that notes what is written in it."""

    def __init__(self, txn: Txn, names: dict[Any, str]) -> None:
        self._txn = txn
        self._names = names
        self.writes: _Writes = {}
        self.get = txn.get
        self.cursor = txn.cursor

    def put(self, key: bytes, value: bytes, *, db: Any) -> None:
        self._txn.put(key, value, db=db)
        self.writes[self._names[db], key] = value

    def delete(self, key: bytes, *, db: Any) -> None:
        self._txn.delete(key, db=db)
        self.writes[self._names[db], key] = None


class PostgresStore(Store):
    """The tables of the training service ``name`` over the database at ``url``, with their copy in ``folder``.

    Raises JournalUnavailable also where PostgreSQL can't be reached or another process has this service. A journal
    in ``folder`` that was this host's alone is the service's beginning, where that has none.
    """

    _copy = True

    def __init__(self, folder: Path, *, map_bytes: int, url: str, name: str) -> None:
        super().__init__(folder, map_bytes=map_bytes)
        self._url = url
        self._name = name
        self._names = {table.handle: table.name for table in self.tables.values()}
        self._noted: _Writes = {}
        self._connection: Connection | None = None
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._closing = False
        # PostgreSQL's, and the copy's
        self._mark = self._copied = Mark("", 0)
        try:
            # all that asks PostgreSQL runs on the writer's thread, on a loop of its own
            self._thread.submit(self._open).result()
        except BaseException:
            self._thread.submit(self._hang_up).result()
            self._release()
            raise

    async def close(self) -> None:
        self._closing = True
        if self._writing is not None:
            await self._writing
        await asyncio.get_running_loop().run_in_executor(self._thread, self._hang_up)
        await super().close()

    def _open(self) -> None:
        self._mark = self._asked(self._patient(self._take))
        with self._env.begin() as txn:
            found = txn.get(COPY_KEY)
        self._copied = Mark("", 0) if found is None else msgspec.msgpack.decode(found, type=Mark)
        holder = secrets.token_hex(16)
        if found is None and self._mark == Mark("", 0):
            self._asked(self._send(_Attempt(self._everything(), Mark(holder, 1))))
        else:
            self._catch_up()
            self._asked(self._send(_Attempt({}, Mark(holder, self._mark.position + 1))))
        with self._env.begin(write=True) as txn:
            self._at(txn)
        self._copied = self._mark

    def _run(self, changes: list[Callable[[Txn], Any]]) -> list[Any]:
        if self.lost:
            raise JournalUnavailable(self.lost)
        self._noted = {}
        try:
            answers = super()._run(changes)
        except lmdb.Error as error:
            if self._copied != self._mark:
                self.lost = f"the copy of the training journal can't be written, and has to be made anew: {error}"
            raise
        self._copied = self._mark
        return answers

    def _make(self, change: Callable[[Txn], Any], txn: Txn) -> Any:
        noted = _Noted(txn, self._names)
        answer = change(noted)
        self._noted |= noted.writes
        return answer

    def _before_commit(self, txn: Txn) -> None:
        if self._noted:
            mark = Mark(self._mark.holder, self._mark.position + 1)
            self._runner.run(self._commit(_Attempt(self._noted, mark)))
            self._at(txn)

    def _at(self, txn: Txn) -> None:
        txn.put(COPY_KEY, msgspec.msgpack.encode(self._mark))

    def _everything(self) -> _Writes:
        with self._env.begin() as txn:
            return {(name, key): value for name, table in self.tables.items() for key, value in table.items(txn)}

    def _catch_up(self) -> None:
        """Make the copy anew unless it is where PostgreSQL is. Raises JournalUnavailable."""
        if self._copied == self._mark:
            return
        _log.info("copying the journal of training service %s from PostgreSQL", self._name)
        with self._env.begin(write=True) as txn:
            for table in self.tables.values():
                table.clear(txn)
            self._asked(self._fetch(txn))
            self._at(txn)
        self._copied = self._mark

    def _asked(self, work: Coroutine[object, object, T]) -> T:
        """What PostgreSQL answers. Raises JournalUnavailable."""
        try:
            return self._runner.run(work)
        except RoostError:
            raise
        except TROUBLE as error:
            self._drop()
            raise JournalUnavailable(f"PostgreSQL can't be reached: {said(error)}", retry_after_s=1.0) from error

    async def _take(self) -> Mark:
        """The service's mark, once its lock is ours. Raises JournalUnavailable."""
        connection = await self._connected()
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1, 0)", _LOCK_CLASS)
            if not await connection.fetchval("SELECT to_regclass('roost_training.services') IS NOT NULL"):
                # whoever may not make schemas may be given one
                if not await connection.fetchval("SELECT to_regnamespace('roost_training') IS NOT NULL"):
                    await connection.execute("CREATE SCHEMA roost_training")
                await connection.execute(_TABLES)
            await connection.execute(
                "INSERT INTO roost_training.services VALUES ($1, $2, '', 0) ON CONFLICT DO NOTHING", self._name, LAYOUT
            )
            layout = await connection.fetchval("SELECT layout FROM roost_training.services WHERE name = $1", self._name)
        if layout != LAYOUT:
            raise JournalUnavailable(
                f"the journal of training service {self._name} has layout {layout}, and this release's is {LAYOUT}"
            )
        return await self._mark_there(connection)

    async def _patient(self, work: Callable[[], Coroutine[object, object, T]]) -> T:
        """The same, again while the lock is held: a process that was killed has it for a moment longer."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return await work()
            except _Held:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(_PAUSE_S)

    async def _commit(self, attempt: _Attempt) -> None:
        """Until it is known whether it is in PostgreSQL. Raises JournalUnavailable and StorageFull where it is not."""
        deadline = time.monotonic() + _PATIENCE_S
        in_doubt = False
        while True:
            try:
                connection = await self._connected()
                if in_doubt and await self._mark_there(connection) == attempt.mark:
                    break
                in_doubt = False
                async with connection.transaction(isolation="read_committed"):
                    await self._write_rows(connection, attempt)
                    in_doubt = True
                break
            except asyncpg.DiskFullError as error:
                self._drop()
                raise StorageFull("PostgreSQL has no room for the training journal") from error
            except (_Held, *TROUBLE) as error:
                self._drop()
                # what is there perhaps is not refused: nobody would do it then, and nobody could ask for it again
                if self._closing or (not in_doubt and time.monotonic() >= deadline):
                    raise JournalUnavailable(
                        f"PostgreSQL can't be written: {said(error)}", retry_after_s=1.0
                    ) from error
                await asyncio.sleep(_PAUSE_S)
        self._mark = attempt.mark

    async def _send(self, attempt: _Attempt) -> None:
        connection = await self._connected()
        async with connection.transaction(isolation="read_committed"):
            await self._write_rows(connection, attempt)
        self._mark = attempt.mark

    async def _write_rows(self, connection: Connection, attempt: _Attempt) -> None:
        held = await connection.fetchval(
            "UPDATE roost_training.services SET holder = $4, position = $5 "
            "WHERE name = $1 AND holder = $2 AND position = $3 RETURNING true",
            self._name, self._mark.holder, self._mark.position, attempt.mark.holder, attempt.mark.position,
        )  # fmt: skip
        if held is None:
            self._lose()
        put = [(self._name, *place, record) for place, record in attempt.writes.items() if record is not None]
        gone = [(self._name, *place) for place, record in attempt.writes.items() if record is None]
        if put:
            await connection.executemany(
                "INSERT INTO roost_training.records VALUES ($1, $2, $3, $4) "
                "ON CONFLICT (service, kind, key) DO UPDATE SET record = excluded.record",
                put,
            )
        if gone:
            await connection.executemany(
                "DELETE FROM roost_training.records WHERE service = $1 AND kind = $2 AND key = $3", gone
            )

    async def _fetch(self, txn: Txn) -> None:
        """All rows, which are as our mark says: only who holds the service writes them."""
        connection = await self._connected()
        async with connection.transaction(isolation="read_committed"):
            rows = connection.cursor(
                "SELECT kind, key, record FROM roost_training.records WHERE service = $1 AND kind = ANY($2)",
                self._name,
                list(self.tables),
                prefetch=_ROWS_AT_ONCE,
            )
            async for row in rows:
                self.tables[row["kind"]].put(txn, row["key"], row["record"])

    async def _mark_there(self, connection: Connection) -> Mark:
        row = await connection.fetchrow(
            "SELECT holder, position FROM roost_training.services WHERE name = $1", self._name
        )
        if row is None:
            raise JournalUnavailable(f"the journal of training service {self._name} is not in PostgreSQL any more")
        return Mark(row["holder"], row["position"])

    async def _connected(self) -> Connection:
        """A connection that holds the service's lock. Raises JournalUnavailable, and what is in TROUBLE."""
        if self._connection is None or self._connection.is_closed():
            connection = await reach(self._url)
            try:
                await self._lock_with(connection)
            except BaseException:
                connection.terminate()
                raise
            self._connection = connection
        return self._connection

    async def _lock_with(self, connection: Connection) -> None:
        if await connection.fetchval("SELECT pg_try_advisory_lock($1, hashtext($2))", _LOCK_CLASS, self._name):
            return
        if self._mark.holder and (await self._mark_there(connection)).holder != self._mark.holder:
            self._lose()
        why = f"another process has training service {self._name}: give this one another name, or let it wait"
        raise _Held(why, retry_after_s=1.0)

    def _lose(self) -> NoReturn:
        self.lost = f"another process has taken over training service {self._name}"
        raise JournalUnavailable(self.lost)

    def _drop(self) -> None:
        """Never use a connection again that something went wrong on."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    def _hang_up(self) -> None:
        async def end() -> None:
            self._drop()

        self._runner.run(end())
        self._runner.close()
