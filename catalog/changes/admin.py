"""Events of bases and keys."""

from __future__ import annotations

from wire.events import BaseAdded, Event, KeyCreated, KeyRevoked

from ..layout import text_key
from ..records import BaseRecord, KeyRecord
from ..snapshot import Snapshot
from .common import damaged, replace


def add_base(view: Snapshot, event: Event, body: BaseAdded) -> None:
    former = view.base(body.name)
    created_ms = event.at_ms if former is None else former.created_ms
    record = BaseRecord(body.name, body.fingerprint, body.path, body.config, body.group, created_ms)
    view.tables.bases.put(view.txn, text_key(body.name), record)


def create_key(view: Snapshot, event: Event, body: KeyCreated) -> None:
    record = KeyRecord(body.key_id, body.key_hash, body.tenant, body.scopes, body.label, False, event.at_ms)
    view.tables.keys.put(view.txn, text_key(body.key_hash), record)
    view.tables.key_ids.put(view.txn, text_key(body.key_id), body.key_hash)


def revoke_key(view: Snapshot, event: Event, body: KeyRevoked) -> None:
    record = view.key_by_id(body.key_id)
    if record is None:
        raise damaged(event, f"there is no key {body.key_id}")
    view.tables.keys.put(view.txn, text_key(record.key_hash), replace(record, revoked=True))
