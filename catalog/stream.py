"""The catalog as one stream of MessagePack: a snapshot of the view, or the journal's events, or one behind the other.

    header   {"roost": "catalog", "format": 1, "layout": 2, "position": 7}
    row      [1, table, key, value]      the view at ``position``, as it lies on disk, tables and keys in order
    event    [2, event]                  an event after ``position``, as it goes over the wire
    trailer  {"entries": 12, "digest": blake3 of all bytes before the trailer, hex}

A snapshot holds the newest event too, so that what is restored from it knows its position.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import msgpack
import msgspec
from blake3 import blake3

from wire.events import Event
from wire.outcomes import InvalidRequest

from .apply import append
from .durable import create_private, fsync_folder
from .environment import BASE_FILE, DATA_FILE, Environment
from .layout import LAYOUT_VERSION, MAX_KEY_BYTES, Txn, number_key
from .names import shown
from .snapshot import Snapshot

FORMAT: Final = 1
_ROW, _EVENT = 1, 2
# a base's config.json may have a megabyte
_MAX_ENTRY_BYTES = 4 << 20
_BUFFER_BYTES = 16 << 20
_WRITE_BYTES = 1 << 20
_ENTRIES_A_TRANSACTION = 20_000
_RESTORE_MAP_BYTES = 1 << 40

Row: TypeAlias = "tuple[str, bytes, bytes]"
Progress = Callable[[int], object]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream begins with. ``position`` is that of its rows; 0 where it has none."""

    roost: str
    format: int
    layout: int
    position: int


class _Trailer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    entries: int
    digest: str


class Summary(msgspec.Struct, frozen=True):
    """What was written or read. ``position`` is that of the last event in it."""

    position: int
    rows: int
    events: int


def _ignore(entries: int) -> None:
    pass


def write_snapshot(environment: Environment, out: BinaryIO, progress: Progress = _ignore) -> Summary:
    """Write the view as it is now, in one read transaction. The registrar may run meanwhile. Raises OSError."""
    with environment.begin() as txn:
        position = Snapshot(txn, environment.tables).position()
        writer = _Writer(out, Header("catalog", FORMAT, LAYOUT_VERSION, position), progress)
        for row in view_rows(environment, txn, position):
            writer.row(row)
        writer.end()
    return Summary(position, writer.rows, 0)


def write_export(
    environment: Environment, out: BinaryIO, *, behind: Reader | None = None, progress: Progress = _ignore
) -> Summary:
    """Write every event that there is, behind the snapshot that stands for the older ones where there is one.

    Raises InvalidRequest where that snapshot is missing or damaged; OSError.
    """
    with environment.begin() as txn:
        view = Snapshot(txn, environment.tables)
        position = 0
        rows: Iterable[Row] = ()
        if behind is not None:
            position, rows = behind.header.position, behind.rows()
        writer = _Writer(out, Header("catalog", FORMAT, LAYOUT_VERSION, position), progress)
        for row in rows:
            writer.row(row)
        last = position
        for event in view.journal(after=position):
            if event.seq != last + 1:
                raise InvalidRequest(
                    f"the journal begins at event {event.seq}: a snapshot at {event.seq - 1} is needed"
                )
            writer.event(event)
            last = event.seq
        writer.end()
    return Summary(last, writer.rows, writer.events)


def write_base(environment: Environment, progress: Progress = _ignore) -> int:
    """Put a durable snapshot beside the catalog that stands for the events so far; its position. Raises OSError."""
    part = environment.path / f"{BASE_FILE}.part"
    part.unlink(missing_ok=True)
    with create_private(part) as out:
        position = write_snapshot(environment, out, progress).position
        out.flush()
        os.fsync(out.fileno())
    part.replace(environment.path / BASE_FILE)
    fsync_folder(environment.path)
    return position


def view_rows(environment: Environment, txn: Txn, position: int) -> Iterator[Row]:
    """All rows of the view, and of the journal the newest event."""
    for name, table in environment.tables.named().items():
        if name == "journal":
            raw = txn.get(number_key(position), db=table.handle)
            if raw is not None:
                yield name, number_key(position), raw
            continue
        for key, raw in txn.cursor(db=table.handle):
            yield name, key, raw


class Reader:
    """A stream that is checked while it is read: its header at once, its bounds all along, its digest at the end.

    Raises InvalidRequest for anything that is not such a stream, or is one of another layout.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._hashed = _HashedFile(file)
        self._unpacker = msgpack.Unpacker(
            self._hashed, raw=False, use_list=True, strict_map_key=True, max_buffer_size=_BUFFER_BYTES,
            max_str_len=_MAX_ENTRY_BYTES, max_bin_len=_MAX_ENTRY_BYTES, max_array_len=1 << 20, max_map_len=1 << 16,
            max_ext_len=0,
        )  # fmt: skip
        self.header = _converted(self._next(), Header)
        if self.header.roost != "catalog" or self.header.format != FORMAT:
            raise InvalidRequest("this is no snapshot or export of a catalog that this release reads")
        if self.header.layout != LAYOUT_VERSION:
            raise InvalidRequest(
                f"the stream has layout {self.header.layout}, and this release reads {LAYOUT_VERSION}: restore it with "
                "the release that wrote it, whose catalog this one migrates"
            )

    def entries(self) -> Iterator[Row | Event]:
        """Rows, then events. Complete and of its digest once this ends."""
        count = 0
        while True:
            covered = self._unpacker.tell()
            entry = self._next()
            match entry:
                case [1, str() as table, bytes() as key, bytes() as raw] if len(key) <= MAX_KEY_BYTES:
                    yield table, key, raw
                case [2, dict() as event]:
                    yield _converted(event, Event)
                case dict():
                    trailer = _converted(entry, _Trailer)
                    break
                case _:
                    raise InvalidRequest(f"entry {count + 1} of the stream is neither a row nor an event")
            count += 1
        if trailer.entries != count or trailer.digest != self._hashed.digest(covered):
            raise InvalidRequest("the stream is damaged: it is not of the digest that it ends with")
        if self._hashed.has_more(self._unpacker.tell()):
            raise InvalidRequest("the stream is damaged: it goes on after its trailer")

    def rows(self) -> Iterator[Row]:
        """The rows alone."""
        for entry in self.entries():
            if isinstance(entry, Event):
                raise InvalidRequest("events where a snapshot was expected")
            yield entry

    def _next(self) -> Any:
        try:
            return self._unpacker.unpack()
        except msgpack.OutOfData:
            raise InvalidRequest("the stream ends before its trailer: it was cut short") from None
        except (ValueError, msgpack.UnpackException) as error:
            raise InvalidRequest(f"the stream is damaged: {error or type(error).__name__}") from None


def restore(file: BinaryIO, catalog_dir: Path, progress: Progress = _ignore) -> Summary:
    """Make a catalog in ``catalog_dir``, which must not hold one yet, of a whole stream, or nothing at all.

    Raises InvalidRequest for a damaged stream or a catalog that is there; JournalUnavailable for events that contradict
    each other.
    """
    for name in (DATA_FILE, BASE_FILE):
        if (catalog_dir / name).exists():
            raise InvalidRequest(
                f"there is a catalog, or what is left of one, in {shown(str(catalog_dir))} ({name}): restore into a "
                "fresh folder"
            )
    catalog_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = catalog_dir / f"restoring-{secrets.token_hex(4)}"
    try:
        with contextlib.closing(Environment.create(part, map_bytes=_RESTORE_MAP_BYTES, durable=False)) as environment:
            summary = load(Reader(file), environment, progress)
            environment.sync()
            if summary.rows:
                write_base(environment)
                (part / BASE_FILE).rename(catalog_dir / BASE_FILE)
        (part / DATA_FILE).rename(catalog_dir / DATA_FILE)
        fsync_folder(catalog_dir)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return summary


def load(reader: Reader, environment: Environment, progress: Progress = _ignore) -> Summary:
    """Put a stream into an empty environment. Raises what ``restore`` does of a stream."""
    handles = {name: table.handle for name, table in environment.tables.named().items()}
    entries = reader.entries()
    rows = events = 0
    position = reader.header.position
    while batch := list(islice(entries, _ENTRIES_A_TRANSACTION)):
        with environment.begin(write=True) as txn, Snapshot.writing(txn, environment.tables) as view:
            for entry in batch:
                if isinstance(entry, Event):
                    if not events:
                        _must_be_at(view, position)
                    append(view, entry)
                    events, position = events + 1, entry.seq
                    continue
                name, key, raw = entry
                if name not in handles or not txn.put(key, raw, db=handles[name], append=True):
                    raise InvalidRequest(
                        f"the stream is damaged: row {rows + 1} does not belong into table {shown(name)}"
                    )
                rows += 1
        progress(rows + events)
    with environment.begin() as txn:
        _must_be_at(Snapshot(txn, environment.tables), position)
    return Summary(position, rows, events)


def _must_be_at(view: Snapshot, position: int) -> None:
    if view.position() != position:
        raise InvalidRequest(
            f"the stream is damaged: it says that its rows are at event {position}, and they are at {view.position()}"
        )


class _Writer:
    def __init__(self, out: BinaryIO, header: Header, progress: Progress) -> None:
        self._out = out
        self._progress = progress
        self._packer = msgpack.Packer(use_bin_type=True, autoreset=True)
        self._hasher = blake3()
        self._waiting = bytearray()
        self.rows = self.events = 0
        self._write(msgspec.to_builtins(header))

    def row(self, row: Row) -> None:
        self._write((_ROW, *row))
        self.rows += 1

    def event(self, event: Event) -> None:
        # bytes stay bytes: to_builtins would make text of them
        self._write((_EVENT, msgspec.to_builtins(event, builtin_types=(bytes,))))
        self.events += 1

    def end(self) -> None:
        self._flush()
        trailer = _Trailer(self.rows + self.events, self._hasher.hexdigest())
        self._out.write(self._packer.pack(msgspec.to_builtins(trailer)))

    def _write(self, entry: Any) -> None:
        self._waiting += self._packer.pack(entry)
        if len(self._waiting) >= _WRITE_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._hasher.update(self._waiting)
        self._out.write(self._waiting)
        self._waiting.clear()
        self._progress(self.rows + self.events)


class _HashedFile:
    """A file whose bytes are hashed up to an offset that lies within the last few reads."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hasher = blake3()
        self._recent = bytearray()
        self._hashed = 0

    def read(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(self._recent) > _BUFFER_BYTES:
            # the unpacker buffers no more than this, so what lies further back is not the trailer
            settled = len(self._recent) - _BUFFER_BYTES
            self._hasher.update(self._recent[:settled])
            del self._recent[:settled]
            self._hashed += settled
        self._recent += data
        return data

    def has_more(self, offset: int) -> bool:
        """Whether there is a byte at ``offset``, behind all that was unpacked."""
        return self._hashed + len(self._recent) > offset or bool(self._file.read(1))

    def digest(self, covered: int) -> str:
        """Of the first ``covered`` bytes."""
        self._hasher.update(self._recent[: covered - self._hashed])
        return self._hasher.hexdigest()


def _converted(value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the stream is damaged: {error}") from None
