"""Applying one event to the view. Every fact of the view comes from here, so that replaying the journal rebuilds it.

Deterministic: the same events in the same order give the same bytes. Nothing here refuses anything; what a command
may do was decided before its event was made (checks.py).
"""

from __future__ import annotations

import msgspec

from wire.events import (
    BaseAdded,
    ChannelMoved,
    ChannelRemoved,
    Event,
    KeyCreated,
    KeyRevoked,
    PolicyCreated,
    PolicyRetired,
    RevisionPublished,
)
from wire.outcomes import JournalUnavailable

from .layout import digest_key, numbered_prefix, short_number_key, text_key
from .names import STABLE
from .records import Arm, ArtifactRecord, BaseRecord, KeyRecord, PolicyRecord, RevisionRecord, RouteRecord
from .snapshot import Snapshot

replace = msgspec.structs.replace


def append(view: Snapshot, event: Event) -> None:
    """Append ``event`` to the journal and apply it to the view, within ``view``'s write transaction.

    Raises JournalUnavailable for an event that contradicts the events before it: the journal is damaged.
    Raises lmdb.Error where it can't be written; the transaction must then be aborted.
    """
    if event.seq != view.position() + 1:
        raise JournalUnavailable(f"event {event.seq} can't follow event {view.position()} of the journal")
    body = event.body
    view.tables.journal.append(view.txn, event, previous=view.last_seq(getattr(body, "policy", "")))
    match body:
        case BaseAdded():
            _add_base(view, event, body)
        case KeyCreated():
            _create_key(view, event, body)
        case KeyRevoked():
            _revoke_key(view, event, body)
        case PolicyCreated():
            _put_policy(view, event, _new_policy(event, body))
        case RevisionPublished():
            _put_policy(view, event, _publish(view, event, body))
        case ChannelMoved():
            record = _policy(view, event, body.policy)
            _put_policy(view, event, replace(record, channels={**record.channels, body.channel: body.target}))
        case ChannelRemoved():
            record = _policy(view, event, body.policy)
            kept = {name: target for name, target in record.channels.items() if name != body.channel}
            _put_policy(view, event, replace(record, channels=kept))
        case PolicyRetired():
            _put_policy(view, event, replace(_policy(view, event, body.policy), retired=True))


def _add_base(view: Snapshot, event: Event, body: BaseAdded) -> None:
    former = view.base(body.name)
    created_ms = event.at_ms if former is None else former.created_ms
    record = BaseRecord(body.name, body.fingerprint, body.path, body.config, body.group, created_ms)
    view.tables.bases.put(view.txn, text_key(body.name), record)


def _create_key(view: Snapshot, event: Event, body: KeyCreated) -> None:
    record = KeyRecord(body.key_id, body.key_hash, body.tenant, body.scopes, body.label, False, event.at_ms)
    view.tables.keys.put(view.txn, text_key(body.key_hash), record)
    view.tables.key_ids.put(view.txn, text_key(body.key_id), body.key_hash)


def _revoke_key(view: Snapshot, event: Event, body: KeyRevoked) -> None:
    record = view.key_by_id(body.key_id)
    if record is None:
        raise _damaged(event, f"there is no key {body.key_id}")
    view.tables.keys.put(view.txn, text_key(record.key_hash), replace(record, revoked=True))


def _new_policy(event: Event, body: PolicyCreated) -> PolicyRecord:
    return PolicyRecord(body.policy, body.base, 0, 0, {STABLE: ()}, False, event.at_ms)


def _publish(view: Snapshot, event: Event, body: RevisionPublished) -> PolicyRecord:
    record = _policy(view, event, body.policy)
    digest = digest_key(body.artifact.digest)
    if view.tables.artifacts.get(view.txn, digest) is None:
        view.tables.artifacts.put(view.txn, digest, ArtifactRecord(body.artifact, event.at_ms, event.seq))
    revision = RevisionRecord(
        body.policy, body.revision, body.artifact, body.provenance, event.actor, event.at_ms, event.seq
    )
    view.tables.revisions.put(view.txn, numbered_prefix(body.policy) + short_number_key(body.revision), revision)
    return replace(record, latest=body.revision)


def _put_policy(view: Snapshot, event: Event, record: PolicyRecord) -> None:
    """Write the policy one version on, its history up to ``event``, with the route that follows from it."""
    name = text_key(record.policy)
    view.tables.policies.put(view.txn, name, replace(record, version=record.version + 1, seq=event.seq))
    view.tables.routes.put(view.txn, name, _route(view, event, record))


def _route(view: Snapshot, event: Event, record: PolicyRecord) -> RouteRecord:
    base = view.base(record.base)
    if base is None:
        raise _damaged(event, f"there is no base {record.base}")

    def arm(revision: int, weight: int = 1) -> Arm:
        found = view.revision(record.policy, revision)
        if found is None:
            raise _damaged(event, f"there is no revision {revision} of {record.policy}")
        facts = found.artifact
        return Arm(revision, digest_key(facts.digest), facts.size, facts.rank, facts.targets, weight)

    return RouteRecord(
        base=record.base,
        retired=record.retired,
        latest=arm(record.latest) if record.latest else None,
        channels={
            name: tuple(arm(split.revision, split.weight) for split in target)
            for name, target in record.channels.items()
        },
    )


def _policy(view: Snapshot, event: Event, name: str) -> PolicyRecord:
    record = view.policy(name)
    if record is None:
        raise _damaged(event, f"there is no policy {name}")
    return record


def _damaged(event: Event, reason: str) -> JournalUnavailable:
    return JournalUnavailable(f"the journal is damaged at event {event.seq} ({type(event.body).__name__}): {reason}")
