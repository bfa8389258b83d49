"""Applying one event to the view. Every fact of the view comes from here, so that replaying the journal rebuilds it.

Deterministic: the same events in the same order give the same bytes. Nothing here refuses anything; what a command
may do was decided before its event was made (checks/).
"""

from __future__ import annotations

from collections.abc import Sequence

from wire.events import (
    AnyEvent,
    ArtifactsCondemned,
    ArtifactsRemoved,
    BaseAdded,
    ChannelMoved,
    ChannelRemoved,
    Event,
    ForwardDropped,
    KeyCreated,
    KeyRevoked,
    LabelsChanged,
    PolicyCreated,
    PolicyRenamed,
    PolicyRestored,
    PolicyRetired,
    RecordReleased,
    RecordRetained,
    RetentionChanged,
    RevisionPublished,
    RevisionRestored,
    RevisionsRetired,
    WriterChanged,
)
from wire.outcomes import JournalUnavailable

from .changes import admin, policies, revisions, training
from .snapshot import Snapshot


def append_all(view: Snapshot, events: Sequence[Event]) -> None:
    """Append and apply ``events`` in order; raises what ``append`` does.

    A new policy and its first revision, one behind the other as an import makes them, are applied in one step, to the
    same rows: most events are of this kind.
    """
    last = len(events) - 1
    place = 0
    while place <= last:
        event = events[place]
        if place < last and _makes_a_policy(event, events[place + 1]):
            _check_follows(view, event.seq)
            revisions.publish_first(view, event, events[place + 1])
            place += 2
        else:
            append(view, event)
            place += 1


def append(view: Snapshot, event: Event) -> None:
    """Append ``event`` to the journal and apply it to the view, within ``view``'s write transaction.

    Raises JournalUnavailable for an event that contradicts the events before it: the journal is damaged.
    Raises lmdb.Error where it can't be written; the transaction must then be aborted.
    """
    _check_follows(view, event.seq)
    view.record(event)
    _change(view, event, event.body)


def _check_follows(view: Snapshot, seq: int) -> None:
    if seq != view.position() + 1:
        raise JournalUnavailable(f"event {seq} can't follow event {view.position()} of the journal")


def _makes_a_policy(event: Event, following: Event) -> bool:
    """Whether these two are a policy's first events."""
    created, published = event.body, following.body
    return (
        isinstance(created, PolicyCreated)
        and isinstance(published, RevisionPublished)
        and published.policy == created.policy
        and following.seq == event.seq + 1
    )


def _change(view: Snapshot, event: Event, body: AnyEvent) -> None:
    match body:
        case RevisionPublished():
            revisions.publish(view, event, body)
        case ChannelMoved():
            policies.move_channel(view, event, body)
        case PolicyCreated():
            policies.create(view, event, body)
        case ChannelRemoved():
            policies.remove_channel(view, event, body)
        case PolicyRetired() | PolicyRestored():
            policies.set_retired(view, event, body.policy, isinstance(body, PolicyRetired))
        case PolicyRenamed():
            policies.rename(view, event, body)
        case ForwardDropped():
            policies.drop_forward(view, event, body)
        case LabelsChanged():
            policies.change_labels(view, event, body)
        case WriterChanged():
            policies.change_writer(view, event, body)
        case RetentionChanged():
            policies.change_retention(view, event, body)
        case RevisionsRetired():
            revisions.retire(view, event, body)
        case RevisionRestored():
            revisions.restore(view, event, body)
        case RecordRetained():
            training.retain(view, event, body)
        case RecordReleased():
            training.release(view, event, body)
        case ArtifactsCondemned():
            revisions.condemn(view, event, body)
        case ArtifactsRemoved():
            revisions.remove(view, event, body)
        case BaseAdded():
            admin.add_base(view, event, body)
        case KeyCreated():
            admin.create_key(view, event, body)
        case KeyRevoked():
            admin.revoke_key(view, event, body)
