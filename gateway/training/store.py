"""LMDB below the journal: typed tables, and a writer that commits what waits in one durable transaction.

The journal of a fleet lies in PostgreSQL, and these tables are then a copy: see ``postgres.py``.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import lmdb
import msgspec

from wire.outcomes import JournalUnavailable, RoostError, StorageFull

from .records import OperationRecord, RunRecord, SamplerRecord, SavedRecord, SessionRecord

_log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)

Txn = Any
_LAYOUT_KEY, LAYOUT = b"layout", 1
# there where the tables are a copy
COPY_KEY = b"copy"
_LOCK_FILE = "training.lock"
_MAX_TABLES = 16
# LMDB's
_MAX_KEY_BYTES = 511
_ENCODE = msgspec.msgpack.Encoder().encode


class Bytes:
    """A table of bytes by bytes."""

    def __init__(self, env: Any, name: str) -> None:
        self.name = name
        self._db = env.open_db(name.encode())

    @property
    def handle(self) -> Any:
        """What transactions know the table by."""
        return self._db

    def get(self, txn: Txn, key: bytes) -> bytes | None:
        found: bytes | None = txn.get(key, db=self._db)
        return found

    def put(self, txn: Txn, key: bytes, value: bytes) -> None:
        txn.put(key, value, db=self._db)

    def delete(self, txn: Txn, key: bytes) -> None:
        txn.delete(key, db=self._db)

    def clear(self, txn: Txn) -> None:
        txn.drop(self._db, delete=False)

    def items(self, txn: Txn, *, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """In the order of keys, from ``start`` on."""
        with txn.cursor(db=self._db) as cursor:
            if cursor.set_range(start):
                yield from cursor


class Table(Generic[R]):
    """A table of one kind of record, by text."""

    def __init__(self, table: Bytes, kind: type[R]) -> None:
        self._bytes = table
        self._decoder = msgspec.msgpack.Decoder(kind)

    def get(self, txn: Txn, key: str) -> R | None:
        """None also for a text that can be no key: clients name what they like."""
        encoded = key.encode(errors="replace")
        if not 0 < len(encoded) <= _MAX_KEY_BYTES:
            return None
        found = self._bytes.get(txn, encoded)
        return None if found is None else self._decoder.decode(found)

    def put(self, txn: Txn, key: str, record: R) -> None:
        self._bytes.put(txn, key.encode(), _ENCODE(record))

    def delete(self, txn: Txn, key: str) -> None:
        self._bytes.delete(txn, key.encode())

    def values(self, txn: Txn, prefix: str = "") -> Iterator[R]:
        """Of the keys that begin with ``prefix``, in their order."""
        start = prefix.encode()
        for key, value in self._bytes.items(txn, start=start):
            if not key.startswith(start):
                return
            yield self._decoder.decode(value)

    def behind(self, txn: Txn, key: str, most: int) -> list[tuple[str, R]]:
        """Keys and records behind ``key``, in their order, at most so many."""
        found = itertools.islice(self._bytes.items(txn, start=key.encode() + b"\0"), most)
        return [(name.decode(), self._decoder.decode(value)) for name, value in found]


class Store:
    """The tables of one training service; no second one can open them.

    Read transactions are for the event loop's thread; ``commit`` runs changes on a thread of its own. Raises
    JournalUnavailable where the folder can't be opened, or another process has it.
    """

    # whether the tables are a copy of what lies elsewhere
    _copy = False

    def __init__(self, folder: Path, *, map_bytes: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _locked(folder)
            self._env = lmdb.open(str(folder), map_size=map_bytes, max_dbs=_MAX_TABLES, readahead=False, mode=0o600)
        except (OSError, lmdb.Error) as error:
            raise JournalUnavailable(f"the training journal in {folder} can't be opened: {error}") from error
        self.tables: dict[str, Bytes] = {}
        # why this process can't write any more, and another one may; empty while it can
        self.lost = ""
        self.sessions = Table(self._table("sessions"), SessionRecord)
        self.runs = Table(self._table("runs"), RunRecord)
        self.samplers = Table(self._table("samplers"), SamplerRecord)
        self.saved = Table(self._table("saved"), SavedRecord)
        self.operations = Table(self._table("operations"), OperationRecord)
        self.asks = self._table("asks")
        self.results = self._table("results")
        # owner and seq -> request id; run and number -> request id
        self.places = self._table("places")
        self.changes = self._table("changes")
        # sampling sessions whose revisions are kept for them
        self.held = self._table("held")
        # request ids without a result; time of the result and request id
        self.pending = self._table("pending")
        self.resolved = self._table("resolved")
        self._check_layout(folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training journal")
        self._waiting: list[tuple[Callable[[Txn], Any], asyncio.Future[Any]]] = []
        self._writing: asyncio.Task[None] | None = None

    def _table(self, name: str) -> Bytes:
        table = self.tables[name] = Bytes(self._env, name)
        return table

    def read(self) -> Txn:
        """A read transaction, as a context manager: the last commit that was durable."""
        return self._env.begin()

    async def commit(self, change: Callable[[Txn], T]) -> T:
        """What ``change`` returns, once its writes are durable: all of them, or none where it raises.

        Raises StorageFull and JournalUnavailable too. A caller that leaves does not undo it.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        return await asyncio.shield(done)

    async def close(self) -> None:
        """Once what waits is durable."""
        if self._writing is not None:
            await self._writing
        self._release()

    def _release(self) -> None:
        self._thread.shutdown()
        self._env.close()
        os.close(self._lock)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                answers = await loop.run_in_executor(self._thread, self._run, [change for change, _ in batch])
            except Exception as error:
                answers = [_told(error)] * len(batch)
            for (_, done), answer in zip(batch, answers, strict=True):
                if done.cancelled():
                    continue
                if isinstance(answer, Exception):
                    done.set_exception(answer)
                else:
                    done.set_result(answer)
        self._writing = None

    def _run(self, changes: list[Callable[[Txn], Any]]) -> list[Any]:
        """What each change returned or raised, all in one transaction."""
        answers: list[Any] = []
        with self._env.begin(write=True) as txn:
            for change in changes:
                try:
                    with self._env.begin(write=True, parent=txn) as own:
                        answers.append(self._make(change, own))
                except lmdb.Error:
                    raise
                except Exception as error:
                    answers.append(error)
            self._before_commit(txn)
        return answers

    def _make(self, change: Callable[[Txn], Any], txn: Txn) -> Any:
        return change(txn)

    def _before_commit(self, txn: Txn) -> None:
        """What has to be safe elsewhere before it is here. Raises RoostError: then nothing of it is."""

    def _check_layout(self, folder: Path) -> None:
        with self._env.begin(write=True) as txn:
            found = txn.get(_LAYOUT_KEY)
            if found is None:
                txn.put(_LAYOUT_KEY, str(LAYOUT).encode())
            elif found != str(LAYOUT).encode():
                raise JournalUnavailable(f"the training journal in {folder} has another layout than this release's")
            if not self._copy and txn.get(COPY_KEY) is not None:
                raise JournalUnavailable(
                    f"the training journal in {folder} is a copy of one in PostgreSQL: give that one's address"
                )


def _told(error: Exception) -> Exception:
    if isinstance(error, RoostError):
        return error
    if not isinstance(error, lmdb.Error | OSError):
        _log.error("a commit of the training journal failed", exc_info=error)
    if isinstance(error, lmdb.MapFullError | lmdb.DiskError):
        return StorageFull(f"the training journal has no room: {error}")
    return JournalUnavailable(f"the training journal can't be written: {error}", retry_after_s=1.0)


def _locked(folder: Path) -> int:
    lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise JournalUnavailable(f"another training service has {folder}") from None
    return lock
