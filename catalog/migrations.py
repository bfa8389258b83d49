"""Bringing a catalog of an older layout to this release's, by replaying its journal into a new file.

The journal is the truth, so only its own layout has to be known: how an older release wrote an event. The former file
is kept beside the new one until an operator removes it.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import lmdb
import msgspec

from wire.events import Event
from wire.outcomes import JournalUnavailable

from .environment import DATA_FILE, LOCK_FILE, Environment
from .layout import LAYOUT_KEY, LAYOUT_VERSION
from .replay import rebuild_from

_log = logging.getLogger(__name__)

_MIGRATING = "migrating"
# address space, whatever the catalog's own: the data may have outgrown what that began with
_MAP_BYTES = 1 << 40


def open_to_write(catalog_dir: Path, map_bytes: int) -> Environment:
    """The catalog, brought to this release's layout first; made where there is none. For who holds the folder.

    Raises JournalUnavailable.
    """
    migrate(catalog_dir)
    return Environment.create(catalog_dir, map_bytes=map_bytes)


def migrate(catalog_dir: Path) -> int | None:
    """Migrate the catalog if it is older; the layout that it had, or None where there was nothing to do.

    Only who holds the folder (exclusive.py) may call this, and no reader may have the catalog open: it would go on
    reading the former file. Killed half-way it begins anew. Raises JournalUnavailable where the catalog can't be read;
    a layout that this release does not know is left for whoever opens the catalog to refuse.
    """
    if not (catalog_dir / DATA_FILE).exists():
        return None
    with _opened(catalog_dir) as (env, layout):
        read = _JOURNALS.get(layout)
        if read is None:
            return None
        _log.info("migrating the catalog in %s from layout %d to %d", catalog_dir, layout, LAYOUT_VERSION)
        part = catalog_dir / _MIGRATING
        shutil.rmtree(part, ignore_errors=True)
        with contextlib.closing(Environment.create(part, map_bytes=_MAP_BYTES, durable=False)) as new:
            events = rebuild_from(read(env), new)
            new.sync()
    _put_in_place(catalog_dir, part, layout)
    _log.info("migrated %d events; the former file is %s", events, _former(catalog_dir, layout).name)
    return layout


@contextlib.contextmanager
def _opened(catalog_dir: Path) -> Iterator[tuple[lmdb.Environment, int]]:
    """The environment as it lies there, and its layout; 0 for none that can be read."""
    try:
        env = lmdb.open(str(catalog_dir), readonly=True, create=False, max_dbs=4, readahead=False)
        with contextlib.closing(env):
            meta = env.open_db(b"meta", create=False)
            with env.begin() as txn:
                found = txn.get(LAYOUT_KEY, db=meta) or b""
            yield env, int(found) if found.isdigit() else 0
    except lmdb.Error as error:
        raise JournalUnavailable(f"the catalog in {catalog_dir} can't be read: {error}") from error


def _events_of_layout_1(env: lmdb.Environment) -> Iterator[Event]:
    """Events as they went over the wire, by number."""
    decode = msgspec.msgpack.Decoder(Event).decode
    journal = env.open_db(b"journal", create=False)
    with env.begin() as txn:
        for _, raw in txn.cursor(db=journal):
            try:
                yield decode(raw)
            except msgspec.MsgspecError as error:
                raise JournalUnavailable(f"the journal of the former layout is damaged: {error}") from error


_JOURNALS: Mapping[int, Callable[[lmdb.Environment], Iterator[Event]]] = {1: _events_of_layout_1}


def _put_in_place(catalog_dir: Path, part: Path, layout: int) -> None:
    data = catalog_dir / DATA_FILE
    former = _former(catalog_dir, layout)
    former.unlink(missing_ok=True)
    # a second name for the former file: at no moment is there no catalog
    former.hardlink_to(data)
    (part / DATA_FILE).replace(data)
    # its table of readers and its newest transaction are those of the former file
    (catalog_dir / LOCK_FILE).unlink(missing_ok=True)
    shutil.rmtree(part, ignore_errors=True)


def _former(catalog_dir: Path, layout: int) -> Path:
    return catalog_dir / f"data.layout-{layout}.mdb"
