"""LMDB below the journal: typed tables, and a writer that commits what waits in one durable transaction."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import lmdb
import msgspec

from wire.outcomes import JournalUnavailable, StorageFull

from .records import OperationRecord, RunRecord, SamplerRecord, SavedRecord, SessionRecord

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)

Txn = Any
_LAYOUT_KEY, _LAYOUT = b"layout", b"1"
_LOCK_FILE = "training.lock"
_MAX_TABLES = 16
_ENCODE = msgspec.msgpack.Encoder().encode


class Bytes:
    """A table of bytes by bytes."""

    def __init__(self, env: Any, name: bytes) -> None:
        self._db = env.open_db(name)

    def get(self, txn: Txn, key: bytes) -> bytes | None:
        found: bytes | None = txn.get(key, db=self._db)
        return found

    def put(self, txn: Txn, key: bytes, value: bytes) -> None:
        txn.put(key, value, db=self._db)

    def delete(self, txn: Txn, key: bytes) -> None:
        txn.delete(key, db=self._db)

    def items(self, txn: Txn, *, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """In the order of keys, from ``start`` on."""
        with txn.cursor(db=self._db) as cursor:
            if cursor.set_range(start):
                yield from cursor


class Table(Generic[R]):
    """A table of one kind of record, by text."""

    def __init__(self, env: Any, name: bytes, kind: type[R]) -> None:
        self._bytes = Bytes(env, name)
        self._decoder = msgspec.msgpack.Decoder(kind)

    def get(self, txn: Txn, key: str) -> R | None:
        found = self._bytes.get(txn, key.encode())
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


class Store:
    """The tables of one training service; no second one can open them.

    Read transactions are for the event loop's thread; ``commit`` runs changes on a thread of its own. Raises
    JournalUnavailable where the folder can't be opened, or another process has it.
    """

    def __init__(self, folder: Path, *, map_bytes: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _locked(folder)
            self._env = lmdb.open(str(folder), map_size=map_bytes, max_dbs=_MAX_TABLES, readahead=False, mode=0o600)
        except (OSError, lmdb.Error) as error:
            raise JournalUnavailable(f"the training journal in {folder} can't be opened: {error}") from error
        self.sessions = Table(self._env, b"sessions", SessionRecord)
        self.runs = Table(self._env, b"runs", RunRecord)
        self.samplers = Table(self._env, b"samplers", SamplerRecord)
        self.saved = Table(self._env, b"saved", SavedRecord)
        self.operations = Table(self._env, b"operations", OperationRecord)
        self.asks = Bytes(self._env, b"asks")
        self.results = Bytes(self._env, b"results")
        # owner and seq -> request id; run and number -> request id; policy -> the run that writes it
        self.places = Bytes(self._env, b"places")
        self.changes = Bytes(self._env, b"changes")
        self.writers = Bytes(self._env, b"writers")
        # request ids without a result; time of the result and request id
        self.pending = Bytes(self._env, b"pending")
        self.resolved = Bytes(self._env, b"resolved")
        self._check_layout(folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training journal")
        self._waiting: list[tuple[Callable[[Txn], Any], asyncio.Future[Any]]] = []
        self._writing: asyncio.Task[None] | None = None

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
        self._thread.shutdown()
        self._env.close()
        os.close(self._lock)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                answers = await loop.run_in_executor(self._thread, self._run, [change for change, _ in batch])
            except (lmdb.Error, OSError) as error:
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
                        answers.append(change(own))
                except lmdb.Error:
                    raise
                except Exception as error:
                    answers.append(error)
        return answers

    def _check_layout(self, folder: Path) -> None:
        with self._env.begin(write=True) as txn:
            found = txn.get(_LAYOUT_KEY)
            if found is None:
                txn.put(_LAYOUT_KEY, _LAYOUT)
            elif found != _LAYOUT:
                raise JournalUnavailable(f"the training journal in {folder} has another layout than this release's")


def _told(error: Exception) -> Exception:
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
