"""What lies where in the LMDB environment: its named databases, their keys and the codec of their records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Generic, TypeAlias, TypeVar

import lmdb
import msgspec

from wire.events import Event

from .records import ArtifactRecord, BaseRecord, KeyRecord, PolicyRecord, RevisionRecord, RouteRecord

# Raised whenever a reader of the former layout would misread the new one.
LAYOUT_VERSION = 1
LAYOUT_KEY = b"layout"
# LMDB's compiled-in bound: a longer key names nothing.
MAX_KEY_BYTES = 511
_MAX_NUMBER = (1 << 63) - 1

R = TypeVar("R")
K = TypeVar("K")
# only its stub is generic
Txn: TypeAlias = "lmdb.Transaction[bytes]"


def text_key(text: str) -> bytes:
    """Any text as a key, also text that is no valid name and so will not be found."""
    return text.encode("utf-8", "surrogatepass")


def number_key(number: int) -> bytes:
    """A sequence number that sorts by value: eight bytes, big-endian, clamped to what can exist."""
    return min(max(number, 0), _MAX_NUMBER).to_bytes(8, "big")


def numbered_prefix(policy: str) -> bytes:
    """What all keys under one policy begin with; no name contains the separator."""
    return text_key(policy) + b"\0"


class Table(Generic[R]):
    """One named database of records of one type. Raises lmdb.Error where the environment can't be read or written."""

    __slots__ = ("_decode", "_encode", "handle", "name")

    def __init__(self, name: str, kind: type[R], handle: lmdb._Database) -> None:
        self.name = name
        self.handle = handle
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._encode = msgspec.msgpack.Encoder().encode

    def narrowed(self, kind: type[K]) -> Table[K]:
        """The same database, reading only the first fields of its records: those of ``kind``."""
        return Table(self.name, kind, self.handle)

    def get(self, txn: Txn, key: bytes) -> R | None:
        """The record of ``key``; None where there is none, or where no such key could exist."""
        if not 0 < len(key) <= MAX_KEY_BYTES:
            return None
        raw = txn.get(key, db=self.handle)
        return None if raw is None else self._decode(raw)

    def put(self, txn: Txn, key: bytes, record: R, *, append: bool = False) -> None:
        """Write or replace. ``append`` is for keys that come in order: LMDB then fills its pages."""
        txn.put(key, self._encode(record), db=self.handle, append=append)

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
                yield key, self._decode(raw)


@dataclasses.dataclass(frozen=True, slots=True)
class Tables:
    """All databases of the environment, beside ``meta``.

    ========== ============================ ==========================================================
    journal    sequence number              the event
    bases      name                         BaseRecord
    policies   tenant/name                  PolicyRecord
    revisions  tenant/name, 0, number       RevisionRecord
    artifacts  digest                       ArtifactRecord
    routes     tenant/name                  RouteRecord
    keys       sha256 of the secret         KeyRecord
    key_ids    key id                       sha256 of the secret
    history    tenant/name, 0, sequence no. nothing: the event is in the journal
    ========== ============================ ==========================================================
    """

    journal: Table[Event]
    bases: Table[BaseRecord]
    policies: Table[PolicyRecord]
    revisions: Table[RevisionRecord]
    artifacts: Table[ArtifactRecord]
    routes: Table[RouteRecord]
    keys: Table[KeyRecord]
    key_ids: Table[str]
    history: Table[None]

    @classmethod
    def open(cls, env: lmdb.Environment, txn: Txn | None = None) -> Tables:
        """Open every database; with a write transaction, make those that are missing.

        Without one each handle gets a transaction of its own: LMDB closes handles that a reset reader opened.
        Raises lmdb.NotFoundError where a database is missing and there is no transaction to make it.
        """

        def table(name: str, kind: type[R]) -> Table[R]:
            return Table(name, kind, env.open_db(name.encode(), txn=txn, create=txn is not None))

        return cls(
            journal=table("journal", Event),
            bases=table("bases", BaseRecord),
            policies=table("policies", PolicyRecord),
            revisions=table("revisions", RevisionRecord),
            artifacts=table("artifacts", ArtifactRecord),
            routes=table("routes", RouteRecord),
            keys=table("keys", KeyRecord),
            key_ids=table("key_ids", str),
            history=table("history", type(None)),
        )

    def named(self) -> dict[str, Table[object]]:
        """The tables by name, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
