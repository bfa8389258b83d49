"""The LMDB environment, opened to write (the registrar alone) or to read (any process of the host)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import lmdb

from wire.outcomes import JournalUnavailable

from .layout import LAYOUT_KEY, LAYOUT_VERSION, Tables, Txn

_MAX_DATABASES = 32
_MAX_READERS = 1024
DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
# the snapshot that the journal continues, where older events were compacted away
BASE_FILE = "journal-base.roost"


class Environment:
    """An open environment and its tables. One process opens one environment once, and shares it.

    Transactions are LMDB's own: a reader sees the last commit that was durable when it began. ``begin`` adopts a map
    that the writer has grown, which must not happen while another transaction of this process is open: whoever reads
    from several threads at once uses ``begin_mapped`` and ``adopt`` (CatalogView does), and the registrar uses its
    environment from one thread.
    """

    def __init__(self, path: Path, env: lmdb.Environment, tables: Tables, meta: lmdb._Database) -> None:
        self.path = path
        self.tables = tables
        self.meta = meta
        self._env = env

    @classmethod
    def create(cls, path: Path, *, map_bytes: int, durable: bool = True) -> Environment:
        """Open to write; made where it does not exist yet. ``durable=False`` is for scratch copies only.

        Every commit writes its pages, fsyncs them, and only then writes the meta page that makes them visible,
        through a descriptor opened O_DSYNC. Raises JournalUnavailable for another layout, and for a snapshot without
        the journal that continues it.
        """
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (path / BASE_FILE).exists() and not (path / DATA_FILE).exists():
            raise JournalUnavailable(
                f"{path} has {BASE_FILE}, and the catalog that continues it is gone: restore both, or move it away"
            )
        with _told(f"the catalog in {path} can't be opened"):
            env = lmdb.open(
                str(path), map_size=map_bytes, max_dbs=_MAX_DATABASES, max_readers=_MAX_READERS, max_spare_txns=1,
                mode=0o600, writemap=False, metasync=durable, sync=durable, readahead=False,
            )  # fmt: skip
        with contextlib.ExitStack() as undo, _told(f"the catalog in {path} can't be written"):
            undo.callback(env.close)
            meta = env.open_db(b"meta")
            with env.begin(write=True) as txn:
                if not txn.stat(meta)["entries"]:
                    txn.put(LAYOUT_KEY, b"%d" % LAYOUT_VERSION, db=meta)
                _check_layout(path, txn, meta)
                tables = Tables.open(env, txn)
            undo.pop_all()
        return cls(path, env, tables, meta)

    @classmethod
    def open(cls, path: Path) -> Environment:
        """Open to read. Raises JournalUnavailable where there is no catalog yet, or one of another layout."""
        if not (path / DATA_FILE).exists():
            raise JournalUnavailable(
                f"there is no catalog in {path}: the registrar makes it when it starts", retry_after_s=1.0
            )
        with _told(f"the catalog in {path} can't be opened"):
            env = lmdb.open(
                str(path), readonly=True, create=False, max_dbs=_MAX_DATABASES, max_readers=_MAX_READERS,
                max_spare_txns=1, readahead=False,
            )  # fmt: skip
        with contextlib.ExitStack() as undo, _told(f"the catalog in {path} is not complete"):
            undo.callback(env.close)
            meta = env.open_db(b"meta", create=False)
            with env.begin() as txn:
                _check_layout(path, txn, meta)
            tables = Tables.open(env)
            undo.pop_all()
        return cls(path, env, tables, meta)

    def begin(self, *, write: bool = False) -> Txn:
        """A transaction, to be used as a context manager. Raises JournalUnavailable."""
        while (txn := self.begin_mapped(write=write)) is None:
            self.adopt()
        return txn

    def begin_mapped(self, *, write: bool = False) -> Txn | None:
        """The same; None where the writer has grown the map, which is to be adopted first."""
        try:
            return self._env.begin(write=write)
        except lmdb.MapResizedError:
            return None
        except lmdb.Error as error:
            raise JournalUnavailable(f"the catalog in {self.path} can't be used: {error}") from error

    def adopt(self) -> None:
        """Map the whole of what the writer has grown. No transaction of this process may be open."""
        self._env.set_mapsize(0)

    @property
    def map_bytes(self) -> int:
        return self._env.info()["map_size"]

    def grow(self) -> None:
        """Double the map. It is address space: the file grows with what is written. No transaction may be open."""
        self._env.set_mapsize(self.map_bytes * 2)

    def drop_dead_readers(self) -> int:
        """Free the reader slots of processes that were killed, whose snapshots would keep old pages from reuse."""
        return self._env.reader_check()

    def sync(self) -> None:
        """Make everything durable that was committed without waiting for the disk."""
        self._env.sync(True)

    def copy(self, folder: Path) -> None:
        """A consistent copy in an empty folder, without the free pages. Writers go on meanwhile."""
        self._env.copy(str(folder), compact=True)

    def close(self) -> None:
        self._env.close()


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise JournalUnavailable(f"{what}: {error}", retry_after_s=1.0) from error


def _check_layout(path: Path, txn: Txn, meta: lmdb._Database) -> None:
    found = txn.get(LAYOUT_KEY, db=meta)
    if found != b"%d" % LAYOUT_VERSION:
        shown = "none" if found is None else ascii(found.decode("ascii", "replace")[:20])
        raise JournalUnavailable(f"the catalog in {path} has layout {shown}, and this release reads {LAYOUT_VERSION}")
