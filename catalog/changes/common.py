"""Reading and writing a policy within an event's transaction."""

from __future__ import annotations

import msgspec

from wire.events import Event
from wire.outcomes import JournalUnavailable

from ..layout import digest_key, numbered_prefix, short_number_key, text_key
from ..records import Arm, PolicyRecord, RevisionRecord, RouteRecord
from ..snapshot import Snapshot

replace = msgspec.structs.replace


def policy_of(view: Snapshot, event: Event, name: str) -> PolicyRecord:
    """The policy that an event names. Raises JournalUnavailable."""
    record = view.policy(name)
    if record is None:
        raise damaged(event, f"there is no policy {name}")
    return record


def revision_of(view: Snapshot, event: Event, policy: str, number: int) -> RevisionRecord:
    """The revision that an event names. Raises JournalUnavailable."""
    record = view.revision(policy, number)
    if record is None:
        raise damaged(event, f"there is no revision {number} of {policy}")
    return record


def put_policy(view: Snapshot, event: Event, record: PolicyRecord) -> None:
    """Write the policy one version on, its history up to ``event``, with the route that follows from it."""
    name = text_key(record.policy)
    view.tables.policies.put(view.txn, name, replace(record, version=record.version + 1, seq=event.seq))
    view.tables.routes.put(view.txn, name, _route(view, event, record))


def put_revision(view: Snapshot, record: RevisionRecord) -> None:
    key = numbered_prefix(record.policy) + short_number_key(record.revision)
    view.tables.revisions.put(view.txn, key, record)


def damaged(event: Event, reason: str) -> JournalUnavailable:
    return JournalUnavailable(f"the journal is damaged at event {event.seq} ({type(event.body).__name__}): {reason}")


def _route(view: Snapshot, event: Event, record: PolicyRecord) -> RouteRecord:
    if view.base(record.base) is None:
        raise damaged(event, f"there is no base {record.base}")

    def arm(revision: int, weight: int = 1) -> Arm:
        facts = revision_of(view, event, record.policy, revision).artifact
        return Arm(revision, digest_key(facts.digest), facts.size, facts.rank, facts.targets, weight)

    return RouteRecord(
        base=record.base,
        retired=record.retired,
        latest=arm(record.latest) if record.latest else None,
        channels={
            name: tuple([arm(split.revision, split.weight) for split in target]) if target else ()
            for name, target in record.channels.items()
        },
        seeds=record.seeds,
    )
