"""Events of training records."""

from __future__ import annotations

from wire.events import Event, RecordReleased, RecordRetained

from ..layout import retained_key
from ..records import RetainedRecord
from ..snapshot import Snapshot
from .common import policy_of, put_policy


def retain(view: Snapshot, event: Event, body: RecordRetained) -> None:
    policy = policy_of(view, event, body.policy)
    record = body.record
    retained = RetainedRecord(record, event.actor, event.at_ms, event.seq)
    view.tables.retained.put(view.txn, retained_key(body.policy, record.kind, record.uri), retained)
    put_policy(view, event, policy)


def release(view: Snapshot, event: Event, body: RecordReleased) -> None:
    policy = policy_of(view, event, body.policy)
    view.tables.retained.delete(view.txn, retained_key(body.policy, body.kind, body.uri))
    put_policy(view, event, policy)
