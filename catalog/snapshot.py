"""Typed look-ups within one transaction: what the registrar checks commands against and what readers see."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from wire.events import Event

from .layout import Tables, Txn, number_key, numbered_prefix, text_key
from .records import ArtifactRecord, BaseRecord, KeyRecord, PolicyRecord, RevisionRecord, RouteRecord


class Snapshot:
    """The catalog as one transaction sees it; of a write transaction, with what that one has written."""

    __slots__ = ("tables", "txn")

    def __init__(self, txn: Txn, tables: Tables) -> None:
        self.txn = txn
        self.tables = tables

    def base(self, name: str) -> BaseRecord | None:
        return self.tables.bases.get(self.txn, text_key(name))

    def bases(self) -> list[BaseRecord]:
        return [record for _, record in self.tables.bases.scan(self.txn)]

    def policy(self, name: str) -> PolicyRecord | None:
        return self.tables.policies.get(self.txn, text_key(name))

    def policies(self, *, prefix: str, after: str, limit: int) -> list[PolicyRecord]:
        """In the order of names; ``after`` is the last name of the page before."""
        scan = self.tables.policies.scan(self.txn, prefix=text_key(prefix), after=text_key(after) if after else None)
        return [record for _, record in islice(scan, limit)]

    def route(self, policy: str) -> RouteRecord | None:
        return self.tables.routes.get(self.txn, text_key(policy))

    def revision(self, policy: str, number: int) -> RevisionRecord | None:
        return self.tables.revisions.get(self.txn, numbered_prefix(policy) + number_key(number))

    def revisions(self, policy: str, *, after: int, limit: int) -> list[RevisionRecord]:
        """In the order of numbers, those above ``after``."""
        prefix = numbered_prefix(policy)
        scan = self.tables.revisions.scan(self.txn, prefix=prefix, after=prefix + number_key(after))
        return [record for _, record in islice(scan, limit)]

    def artifact(self, digest: str) -> ArtifactRecord | None:
        return self.tables.artifacts.get(self.txn, text_key(digest))

    def key(self, key_hash: str) -> KeyRecord | None:
        return self.tables.keys.get(self.txn, text_key(key_hash))

    def key_by_id(self, key_id: str) -> KeyRecord | None:
        key_hash = self.tables.key_ids.get(self.txn, text_key(key_id))
        return None if key_hash is None else self.key(key_hash)

    def keys(self) -> list[KeyRecord]:
        """In the order of key ids."""
        found = (self.key(key_hash) for _, key_hash in self.tables.key_ids.scan(self.txn))
        return [record for record in found if record is not None]

    def position(self) -> int:
        """The newest sequence number; 0 for an empty journal."""
        key = self.tables.journal.last_key(self.txn)
        return 0 if key is None else int.from_bytes(key, "big")

    def journal(self, *, after: int) -> Iterator[Event]:
        """The events above ``after``, in order."""
        for _, event in self.tables.journal.scan(self.txn, after=number_key(after)):
            yield event

    def history(self, policy: str) -> list[Event]:
        """The events of one policy, oldest first."""
        prefix = numbered_prefix(policy)
        events = []
        for key, _ in self.tables.history.scan(self.txn, prefix=prefix):
            event = self.tables.journal.get(self.txn, key[len(prefix) :])
            if event is not None:
                events.append(event)
        return events
