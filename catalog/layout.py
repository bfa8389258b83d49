"""What lies where in the LMDB environment: its named databases, their keys and the codec of their records."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import lmdb
import msgspec

from wire.events import ChannelMoved, Event, PolicyCreated, RecordKind, RevisionPublished
from wire.outcomes import JournalUnavailable

from .packing import form_of
from .records import (
    Arm,
    ArtifactRecord,
    BaseRecord,
    KeyRecord,
    PolicyRecord,
    RetainedRecord,
    RevisionHead,
    RevisionRecord,
    RouteRecord,
)

# Raised whenever a reader of the former layout would misread the new one.
LAYOUT_VERSION = 2
LAYOUT_KEY = b"layout"
# LMDB's compiled-in bound: a longer key names nothing.
MAX_KEY_BYTES = 511
_MAX_NUMBER = (1 << 63) - 1
# by how many fields end with it
_ROUTE_DEFAULTS: Mapping[int, object] = {
    place: field.default_factory()
    for place, field in enumerate(msgspec.structs.fields(RouteRecord), start=1)
    if field.default_factory is not msgspec.NODEFAULT
}
_decode_packed = msgspec.msgpack.Decoder().decode
_EVENT_FIELDS = len(Event.__struct_fields__)
# what the commonest events are called on disk; the others go by their names
TAGS: Mapping[type, int | str] = {PolicyCreated: 1, RevisionPublished: 2, ChannelMoved: 3}

# those of most revisions, made once
_SHORT_KEYS = tuple(bytes((1, number)) for number in range(256))

R = TypeVar("R")
# only its stub is generic
Txn: TypeAlias = "lmdb.Transaction[bytes]"


def text_key(text: str) -> bytes:
    """Any text as a key, also text that is no valid name and so will not be found."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def number_key(number: int) -> bytes:
    """A sequence number that sorts by value: eight bytes, big-endian, clamped to what can exist."""
    return min(max(number, 0), _MAX_NUMBER).to_bytes(8, "big")


def short_number_key(number: int) -> bytes:
    """The same in as few bytes as it needs, behind their count."""
    if 0 < number < len(_SHORT_KEYS):
        return _SHORT_KEYS[number]
    clamped = min(max(number, 0), _MAX_NUMBER)
    length = (clamped.bit_length() + 7) // 8
    return bytes((length,)) + clamped.to_bytes(length, "big")


def digest_key(digest: str) -> bytes:
    """The bytes that lower-case hex digits stand for; of any other text, a key that nothing has."""
    try:
        raw = bytes.fromhex(digest)
    except ValueError:
        return b""
    return raw if raw.hex() == digest else b""


def numbered_prefix(policy: str) -> bytes:
    """What all keys under one policy begin with; no name contains the separator."""
    return text_key(policy) + b"\0"


def label_prefix(key: str, value: str) -> bytes:
    """What the index keys of one label begin with; a label's key contains no equals sign, its value no separator."""
    return text_key(f"{key}={value}") + b"\0"


def retained_key(policy: str, kind: RecordKind, uri: str) -> bytes:
    """One training record of a policy; its address may be longer than a key, so its hash stands for it."""
    return numbered_prefix(policy) + kind.value[:1].encode() + hashlib.blake2b(text_key(uri), digest_size=16).digest()


class Table(Generic[R]):
    """One named database of records of one type. Raises lmdb.Error where the environment can't be read or written."""

    __slots__ = ("_decode", "_encode", "handle", "name")

    def __init__(self, name: str, kind: type[R], handle: lmdb._Database) -> None:
        self.name = name
        self.handle = handle
        self._decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(kind).decode
        self._encode = msgspec.msgpack.Encoder().encode

    def get(self, txn: Txn, key: bytes) -> R | None:
        """The record of ``key``; None where there is none, or where no such key could exist."""
        if not 0 < len(key) <= MAX_KEY_BYTES:
            return None
        raw = txn.get(key, db=self.handle)
        return None if raw is None else self._read(txn, key, raw)

    def put(self, txn: Txn, key: bytes, record: R, *, append: bool = False) -> None:
        """Write or replace. ``append`` is for keys that come in order: LMDB then fills its pages."""
        txn.put(key, self._write(record), db=self.handle, append=append)

    def put_all(self, txn: Txn, rows: Sequence[tuple[bytes, R]]) -> None:
        """The same for many, in the order of their keys: LMDB then looks for most places where it just was."""
        write = self._write
        txn.cursor(db=self.handle).putmulti([(key, write(record)) for key, record in rows])

    def delete(self, txn: Txn, key: bytes) -> None:
        txn.delete(key, db=self.handle)

    def last_key(self, txn: Txn) -> bytes | None:
        cursor = txn.cursor(db=self.handle)
        return cursor.key() if cursor.last() else None

    def scan(self, txn: Txn, *, prefix: bytes = b"", after: bytes | None = None) -> Iterator[tuple[bytes, R]]:
        """Keys that begin with ``prefix`` and come after ``after``, in order, with their records."""
        start = prefix if after is None else max(prefix, after + b"\0")
        cursor = txn.cursor(db=self.handle)
        found = cursor.set_range(start[:MAX_KEY_BYTES]) if start else cursor.first()
        if not found:
            return
        for key, raw in cursor.iternext():
            if not key.startswith(prefix):
                return
            if after is None or key > after:
                yield key, self._read(txn, key, raw)

    def _read(self, txn: Txn, key: bytes, raw: bytes) -> R:
        record: R = self._decode(raw)
        return record

    def _write(self, record: R) -> bytes:
        return self._encode(record)


class RouteTable(Table[RouteRecord]):
    """Routes, without the fields at their end that have their defaults."""

    __slots__ = ()

    def __init__(self, name: str, handle: lmdb._Database) -> None:
        super().__init__(name, RouteRecord, handle)

    def _write(self, record: RouteRecord) -> bytes:
        values = list(msgspec.structs.astuple(record))
        while (count := len(values)) in _ROUTE_DEFAULTS and values[-1] == _ROUTE_DEFAULTS[count]:
            values.pop()
        return self._encode(values)


class PackedTable(Table[R]):
    """Records in their packed form (packing.py): for databases with a row for every policy or event."""

    __slots__ = ("_form",)

    def __init__(self, name: str, kind: type[R], handle: lmdb._Database) -> None:
        super().__init__(name, kind, handle)
        form = form_of(kind, TAGS)
        if form is None:
            raise TypeError(f"{kind} needs no packing")
        self._form = form
        self._decode = msgspec.msgpack.Decoder().decode

    def _read(self, txn: Txn, key: bytes, raw: bytes) -> R:
        values = self._decode(raw)
        self._restore(txn, key, values)
        record: R = self._form.unpack(values)
        return record

    def _write(self, record: R) -> bytes:
        values = self._form.pack(record)
        self._strip(values)
        return self._encode(values)

    def _strip(self, values: list[Any]) -> None:
        """Take out of a packed record what need not be written with it."""

    def _restore(self, txn: Txn, key: bytes, values: list[Any]) -> None:
        """Put in again what ``_strip`` took."""


class JournalTable(PackedTable[Event]):
    """Events by number, each with the position of the event before it of the same policy."""

    __slots__ = ()

    def append(self, txn: Txn, event: Event, *, previous: int) -> None:
        """``previous`` is 0 for the first event of a policy, and for one that concerns none."""
        values = self._form.pack(event)
        if previous:
            values.append(previous)
        txn.put(number_key(event.seq), self._encode(values), db=self.handle, append=True)

    def linked(self, txn: Txn, seq: int) -> tuple[Event, int] | None:
        """The event at ``seq`` and the position of the one before it; None where the journal has none there."""
        raw = txn.get(number_key(seq), db=self.handle)
        if raw is None:
            return None
        values = self._decode(raw)
        event: Event = self._form.unpack(values[:_EVENT_FIELDS])
        return event, values[_EVENT_FIELDS] if len(values) > _EVENT_FIELDS else 0

    def _restore(self, txn: Txn, key: bytes, values: list[Any]) -> None:
        del values[_EVENT_FIELDS:]


class PolicyTable(PackedTable[PolicyRecord]):
    """A policy's name is its key."""

    __slots__ = ()

    def __init__(self, name: str, handle: lmdb._Database) -> None:
        super().__init__(name, PolicyRecord, handle)

    def _strip(self, values: list[Any]) -> None:
        values[0] = None

    def _restore(self, txn: Txn, key: bytes, values: list[Any]) -> None:
        values[0] = key.decode()


class ArtifactTable(PackedTable[ArtifactRecord]):
    """An artifact's digest is its key. Its facts outlive its row: a retired revision may name it still."""

    __slots__ = ("_former",)

    def __init__(self, name: str, handle: lmdb._Database, former: lmdb._Database) -> None:
        super().__init__(name, ArtifactRecord, handle)
        self._former = former

    def delete(self, txn: Txn, key: bytes) -> None:
        facts = self.facts(txn, key)
        if facts is not None:
            txn.put(key, self._encode(facts), db=self._former)
        super().delete(txn, key)

    def facts(self, txn: Txn, digest: bytes) -> list[Any] | None:
        """The packed facts of an artifact that is, or was, in the catalog; without the digest."""
        raw = txn.get(digest, db=self.handle)
        if raw is not None:
            facts: list[Any] = self._decode(raw)[0]
            return facts
        raw = txn.get(digest, db=self._former)
        return None if raw is None else self._decode(raw)

    def _strip(self, values: list[Any]) -> None:
        values[0][0] = None

    def _restore(self, txn: Txn, key: bytes, values: list[Any]) -> None:
        values[0][0] = key


class RevisionTable(PackedTable[RevisionRecord]):
    """A revision's policy and number are its key, and what a request needs comes first. Of its artifact that is all
    that stands here: the other facts are in a table of their own."""

    __slots__ = ("_artifacts",)

    def __init__(self, name: str, handle: lmdb._Database, artifacts: ArtifactTable) -> None:
        super().__init__(name, RevisionRecord, handle)
        self._artifacts = artifacts

    def _strip(self, values: list[Any]) -> None:
        _, _, (digest, size, rank, targets, *_), provenance, actor, published_ms, seq, *later = values
        retired_ms, *later = later or (0,)
        values[:] = [digest, retired_ms, size, rank, targets, provenance, actor, published_ms, seq, *later]

    def _restore(self, txn: Txn, key: bytes, values: list[Any]) -> None:
        policy, _, number = key.partition(b"\0")
        digest, retired_ms, _, _, _, provenance, actor, published_ms, seq, *later = values
        facts = self._artifacts.facts(txn, digest)
        if facts is None:
            raise JournalUnavailable(f"the catalog has lost artifact {digest.hex()} of {policy!r}")
        facts[0] = digest
        head = [policy.decode(), int.from_bytes(number[1:], "big"), facts]
        values[:] = [*head, provenance, actor, published_ms, seq, retired_ms, *later]


def artifact_of(revision: bytes) -> bytes:
    """The digest, 32 bytes, of the artifact of a revision's row."""
    digest: bytes = _decode_packed(revision)[0]
    return digest


class Arms:
    """Numbered revisions as requests need them, without the rest of their records."""

    __slots__ = ("_decode", "_revisions")

    def __init__(self, revisions: RevisionTable) -> None:
        self._revisions = revisions.handle
        self._decode = msgspec.msgpack.Decoder(RevisionHead).decode

    def get(self, txn: Txn, policy: str, number: int) -> tuple[Arm, int] | None:
        """The arm, and when the revision was retired (0: it was not); None where there is no such revision."""
        key = numbered_prefix(policy) + short_number_key(number)
        raw = txn.get(key, db=self._revisions) if len(key) <= MAX_KEY_BYTES else None
        if raw is None:
            return None
        head = self._decode(raw)
        return Arm(number, head.digest, head.size, head.rank, head.targets), head.retired_ms

    def scan(self, txn: Txn, policy: str) -> Iterator[tuple[int, str, int]]:
        """Number, digest and when it was retired (0: it was not) of each revision of the policy, in order."""
        prefix = numbered_prefix(policy)
        cursor = txn.cursor(db=self._revisions)
        if len(prefix) > MAX_KEY_BYTES or not cursor.set_range(prefix):
            return
        for key, raw in cursor.iternext():
            if not key.startswith(prefix):
                return
            head = self._decode(raw)
            yield int.from_bytes(key[len(prefix) + 1 :], "big"), head.digest.hex(), head.retired_ms


@dataclasses.dataclass(frozen=True, slots=True)
class Tables:
    """All databases of the environment, beside ``meta``.

    ========== ============================ ==========================================================
    journal    sequence number              the event, and the number of the one before it of the same policy
    bases      name                         BaseRecord
    policies   tenant/name                  PolicyRecord
    revisions  tenant/name, 0, short number RevisionRecord
    artifacts  digest, 32 bytes             ArtifactRecord
    former_artifacts the same               the facts of artifacts that are gone
    routes     tenant/name                  RouteRecord
    keys       sha256 of the secret         KeyRecord
    key_ids    key id                       sha256 of the secret
    forwards   a former tenant/name         the name that it stands for
    by_base    base, 0, tenant/name         nothing
    by_label   key=value, 0, tenant/name    nothing
    retaining  tenant/name                  nothing: the policies whose revisions are not all kept
    retained   tenant/name, 0, kind, hash   RetainedRecord
    unnamed    digest                       nothing: the artifacts that no revision names any more
    ========== ============================ ==========================================================
    """

    journal: JournalTable
    bases: Table[BaseRecord]
    policies: Table[PolicyRecord]
    revisions: Table[RevisionRecord]
    artifacts: Table[ArtifactRecord]
    former_artifacts: Table[list[Any]]
    routes: Table[RouteRecord]
    keys: Table[KeyRecord]
    key_ids: Table[str]
    forwards: Table[str]
    by_base: Table[None]
    by_label: Table[None]
    retaining: Table[None]
    retained: Table[RetainedRecord]
    unnamed: Table[None]
    arms: Arms

    @classmethod
    def open(cls, env: lmdb.Environment, txn: Txn | None = None) -> Tables:
        """Open every database; with a write transaction, make those that are missing.

        Without one each handle gets a transaction of its own: LMDB closes handles that a reset reader opened.
        Raises lmdb.NotFoundError where a database is missing and there is no transaction to make it.
        """

        def handle(name: str) -> lmdb._Database:
            return env.open_db(name.encode(), txn=txn, create=txn is not None)

        def table(name: str, kind: type[R]) -> Table[R]:
            return Table(name, kind, handle(name))

        former = table("former_artifacts", list[Any])
        artifacts = ArtifactTable("artifacts", handle("artifacts"), former.handle)
        revisions = RevisionTable("revisions", handle("revisions"), artifacts)
        return cls(
            journal=JournalTable("journal", Event, handle("journal")),
            bases=table("bases", BaseRecord),
            policies=PolicyTable("policies", handle("policies")),
            revisions=revisions,
            artifacts=artifacts,
            former_artifacts=former,
            routes=RouteTable("routes", handle("routes")),
            keys=table("keys", KeyRecord),
            key_ids=table("key_ids", str),
            forwards=table("forwards", str),
            by_base=table("by_base", type(None)),
            by_label=table("by_label", type(None)),
            retaining=table("retaining", type(None)),
            retained=table("retained", RetainedRecord),
            unnamed=table("unnamed", type(None)),
            arms=Arms(revisions),
        )

    def named(self) -> dict[str, Table[object]]:
        """The tables by name, in the order of the fields."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: table for name, table in fields.items() if isinstance(table, Table)}
