"""Typed look-ups within one transaction: what the registrar checks commands against and what readers see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice

from wire.events import Event, RecordKind
from wire.outcomes import InvalidRequest

from .buffered import BufferedTable, buffered, flush
from .layout import (
    Table,
    Tables,
    Txn,
    digest_key,
    label_prefix,
    number_key,
    numbered_prefix,
    retained_key,
    short_number_key,
    text_key,
)
from .records import (
    Arm,
    ArtifactRecord,
    BaseRecord,
    KeyRecord,
    PolicyRecord,
    RetainedRecord,
    RevisionRecord,
    RouteRecord,
)


class Snapshot:
    """The catalog as one transaction sees it; of a write transaction, with what that one has written."""

    __slots__ = ("_position", "tables", "txn")

    def __init__(self, txn: Txn, tables: Tables) -> None:
        self.txn = txn
        self.tables = tables
        self._position: int | None = None

    @classmethod
    @contextlib.contextmanager
    def writing(cls, txn: Txn, tables: Tables) -> Iterator[Snapshot]:
        """For a batch of events: what they change is written at the end. Raises lmdb.Error where it can't be."""
        view = cls(txn, buffered(tables))
        yield view
        flush(view.tables, txn)

    def record(self, event: Event) -> None:
        """Append ``event`` to the journal, linked to the event before it of the same policy."""
        policy = getattr(event.body, "policy", "")
        self.record_after(event, self.last_seq(policy) if policy else 0)

    def record_after(self, event: Event, previous: int) -> None:
        """The same where the position of the event before it is known; 0: it is the first."""
        self.tables.journal.append(self.txn, event, previous=previous)
        self._position = event.seq

    def base(self, name: str) -> BaseRecord | None:
        return self.tables.bases.get(self.txn, text_key(name))

    def bases(self) -> list[BaseRecord]:
        return [record for _, record in self.tables.bases.scan(self.txn)]

    def policy(self, name: str) -> PolicyRecord | None:
        return self.tables.policies.get(self.txn, text_key(name))

    def followed(self, name: str) -> PolicyRecord | None:
        """The policy called ``name`` now, or the one that this former name forwards to."""
        found = self.policy(name)
        if found is None and (forwarded := self.forward(name)) is not None:
            found = self.policy(forwarded)
        return found

    def forward(self, name: str) -> str | None:
        """What a former name stands for now."""
        return self.tables.forwards.get(self.txn, text_key(name))

    def policies(self, *, prefix: str, after: str, limit: int) -> list[PolicyRecord]:
        """In the order of names; ``after`` is the last name of the page before."""
        return list(islice(self.all_policies(prefix=prefix, after=after), limit))

    def all_policies(self, *, prefix: str, after: str) -> Iterator[PolicyRecord]:
        """The same without a bound."""
        scan = self.tables.policies.scan(self.txn, prefix=text_key(prefix), after=text_key(after) if after else None)
        for _, record in scan:
            yield record

    def names_over(self, base: str, *, prefix: str, after: str) -> Iterator[str]:
        """Policies over ``base``, in the order of their names."""
        return self._indexed(self.tables.by_base, text_key(base) + b"\0", prefix, after)

    def names_labelled(self, key: str, value: str, *, prefix: str, after: str) -> Iterator[str]:
        """Policies with this label, in the order of their names."""
        return self._indexed(self.tables.by_label, label_prefix(key, value), prefix, after)

    def names_with_retention(self, *, after: str) -> Iterator[str]:
        """Policies whose revisions are not all kept, in the order of their names."""
        return self._indexed(self.tables.retaining, b"", "", after)

    def unnamed(self, *, after: str) -> Iterator[str]:
        """Digests of the artifacts that no revision names any more."""
        return self._indexed(self.tables.unnamed, b"", "", after)

    def is_unnamed(self, digest: str) -> bool:
        known = self.artifact(digest)
        return known is not None and not known.revisions

    def route(self, policy: str) -> RouteRecord | None:
        return self.tables.routes.get(self.txn, text_key(policy))

    def revision(self, policy: str, number: int) -> RevisionRecord | None:
        return self.tables.revisions.get(self.txn, numbered_prefix(policy) + short_number_key(number))

    def arm(self, policy: str, number: int) -> tuple[Arm, int] | None:
        """A revision as a request needs it, and when it was retired (Unix time in ms; 0: it was not)."""
        return self.tables.arms.get(self.txn, policy, number)

    def revisions(self, policy: str, *, after: int, limit: int) -> list[RevisionRecord]:
        """In the order of numbers, those above ``after``."""
        prefix = numbered_prefix(policy)
        scan = self.tables.revisions.scan(self.txn, prefix=prefix, after=prefix + short_number_key(after))
        return [record for _, record in islice(scan, limit)]

    def all_revisions(self, policy: str) -> Iterator[RevisionRecord]:
        """In the order of numbers."""
        for _, record in self.tables.revisions.scan(self.txn, prefix=numbered_prefix(policy)):
            yield record

    def heads(self, policy: str) -> Iterator[tuple[int, str, int]]:
        """Number, digest and time of retirement (0: none) of all revisions, in order, without the rest of them."""
        if isinstance(self.tables.revisions, BufferedTable):
            self.tables.revisions.flush(self.txn)
        return self.tables.arms.scan(self.txn, policy)

    def retained(self, policy: str) -> list[RetainedRecord]:
        """The training records that the policy keeps hold of: checkpoints first, each kind oldest first."""
        prefix = numbered_prefix(policy)
        records = [record for _, record in self.tables.retained.scan(self.txn, prefix=prefix)]
        return sorted(records, key=lambda retained: (retained.record.kind, retained.seq))

    def retained_record(self, policy: str, kind: RecordKind, uri: str) -> RetainedRecord | None:
        return self.tables.retained.get(self.txn, retained_key(policy, kind, uri))

    def artifact(self, digest: str) -> ArtifactRecord | None:
        return self.tables.artifacts.get(self.txn, digest_key(digest))

    def key(self, key_hash: str) -> KeyRecord | None:
        return self.tables.keys.get(self.txn, text_key(key_hash))

    def key_by_id(self, key_id: str) -> KeyRecord | None:
        key_hash = self.tables.key_ids.get(self.txn, text_key(key_id))
        return None if key_hash is None else self.key(key_hash)

    def keys(self, *, after: str) -> Iterator[KeyRecord]:
        """In the order of key ids, after that one."""
        for _, key_hash in self.tables.key_ids.scan(self.txn, after=text_key(after) if after else None):
            if (record := self.key(key_hash)) is not None:
                yield record

    def position(self) -> int:
        """The newest sequence number; 0 for an empty journal."""
        if self._position is not None:
            return self._position
        key = self.tables.journal.last_key(self.txn)
        return 0 if key is None else int.from_bytes(key, "big")

    def journal(self, *, after: int) -> Iterator[Event]:
        """The events above ``after``, in order."""
        for _, event in self.tables.journal.scan(self.txn, after=number_key(after)):
            yield event

    def history(self, policy: str, *, before: int, limit: int | None) -> list[Event]:
        """The events of one policy that the journal still holds, oldest first; under whatever name it had then.

        ``before``: only what came before that event of it; 0: all. ``limit``: only so many, the newest. Raises
        InvalidRequest where ``before`` is no event of the tenant's.
        """
        events: list[Event] = []
        seq = self._before(policy, before) if before else self.last_seq(policy)
        while seq and len(events) != limit and (found := self.tables.journal.linked(self.txn, seq)) is not None:
            event, seq = found
            events.append(event)
        return events[::-1]

    def _before(self, policy: str, seq: int) -> int:
        """The position of the event before ``seq`` of the same policy. Names change, and never their tenants."""
        found = self.tables.journal.linked(self.txn, seq)
        if found is not None:
            event, previous = found
            if getattr(event.body, "policy", "").partition("/")[0] == policy.partition("/")[0]:
                return previous
        raise InvalidRequest(f"event {seq} is none of {policy}", field="after")

    def last_seq(self, policy: str) -> int:
        """The position of the policy's last event; 0 where there is no such policy."""
        record = self.policy(policy)
        return 0 if record is None else record.seq

    def _indexed(self, table: Table[None], head: bytes, prefix: str, after: str) -> Iterator[str]:
        start = head + text_key(after) if after else None
        for key, _ in table.scan(self.txn, prefix=head + text_key(prefix), after=start):
            yield key[len(head) :].decode()
