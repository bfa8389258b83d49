"""Events of policies as a whole, of their channels, names and labels."""

from __future__ import annotations

from wire.events import (
    ChannelMoved,
    ChannelRemoved,
    Event,
    ForwardDropped,
    LabelsChanged,
    PolicyCreated,
    PolicyRenamed,
    RetentionChanged,
    Split,
    WriterChanged,
)

from ..layout import label_prefix, numbered_prefix, text_key
from ..names import STABLE
from ..records import PolicyRecord
from ..snapshot import Snapshot
from .common import policy_of, put_policy, put_revision, replace

# how many former targets of a channel a rollback can return to
MAX_FORMER = 8

Targets = tuple[tuple[Split, ...], ...]


def create(view: Snapshot, event: Event, body: PolicyCreated) -> None:
    put_policy(view, event, new_policy(view, event, body, version=0))


def new_policy(view: Snapshot, event: Event, body: PolicyCreated, *, version: int) -> PolicyRecord:
    """The record of a policy that is still to be written, one version on; its index row is."""
    record = PolicyRecord(body.policy, body.base, 0, version, {STABLE: ()}, False, event.at_ms)
    view.tables.by_base.put(view.txn, _base_key(record), None)
    return record


def move_channel(view: Snapshot, event: Event, body: ChannelMoved) -> None:
    record = policy_of(view, event, body.policy)
    seeds = {name: seed for name, seed in record.seeds.items() if name != body.channel}
    if body.seed:
        seeds[body.channel] = body.seed
    channels = {**record.channels, body.channel: body.target}
    before = record.before
    if body.undone or body.replaced:
        former = before.get(body.channel, ())
        former = former[: max(len(former) - body.undone, 0)]
        before = _with_former(before, body.channel, (*former, body.replaced) if body.replaced else former)
    put_policy(view, event, replace(record, channels=channels, seeds=seeds, before=before))


def served_before_publish(record: PolicyRecord) -> dict[str, Targets]:
    """What channels served before, once another revision is the latest: of one that follows it, and has been moved
    about before, also the revision that was the latest until now."""
    before = record.before
    for channel in record.before:
        if not record.channels[channel]:
            before = _with_former(before, channel, (*before[channel], (Split(record.latest),)))
    return before


def remove_channel(view: Snapshot, event: Event, body: ChannelRemoved) -> None:
    record = policy_of(view, event, body.policy)
    channels = {name: target for name, target in record.channels.items() if name != body.channel}
    seeds = {name: seed for name, seed in record.seeds.items() if name != body.channel}
    before = _with_former(record.before, body.channel, ())
    put_policy(view, event, replace(record, channels=channels, seeds=seeds, before=before))


def set_retired(view: Snapshot, event: Event, policy: str, retired: bool) -> None:
    put_policy(view, event, replace(policy_of(view, event, policy), retired=retired))


def rename(view: Snapshot, event: Event, body: PolicyRenamed) -> None:
    """Everything under the former name goes under the new one, and all former names forward to that."""
    record = policy_of(view, event, body.policy)
    former = (*(name for name in record.former if name != body.to), body.policy)
    renamed = replace(record, policy=body.to, former=former)
    _move_rows(view, body)
    _unindex(view, record)
    _index(view, renamed)
    view.tables.forwards.delete(view.txn, text_key(body.to))
    for name in former:
        view.tables.forwards.put(view.txn, text_key(name), body.to)
    put_policy(view, event, renamed)


def drop_forward(view: Snapshot, event: Event, body: ForwardDropped) -> None:
    record = policy_of(view, event, body.policy)
    view.tables.forwards.delete(view.txn, text_key(body.name))
    put_policy(view, event, replace(record, former=tuple(name for name in record.former if name != body.name)))


def change_labels(view: Snapshot, event: Event, body: LabelsChanged) -> None:
    record = policy_of(view, event, body.policy)
    labels = {key: value for key, value in record.labels.items() if key not in body.removed} | body.labels
    changed = replace(record, labels=labels)
    _unindex(view, record)
    _index(view, changed)
    put_policy(view, event, changed)


def change_writer(view: Snapshot, event: Event, body: WriterChanged) -> None:
    put_policy(view, event, replace(policy_of(view, event, body.policy), writer=body.writer))


def change_retention(view: Snapshot, event: Event, body: RetentionChanged) -> None:
    changed = replace(policy_of(view, event, body.policy), retention=body.retention)
    name = text_key(body.policy)
    if body.retention is None:
        view.tables.retaining.delete(view.txn, name)
    else:
        view.tables.retaining.put(view.txn, name, None)
    put_policy(view, event, changed)


def _with_former(before: dict[str, Targets], channel: str, former: Targets) -> dict[str, Targets]:
    others = {name: targets for name, targets in before.items() if name != channel}
    return {**others, channel: former[-MAX_FORMER:]} if former else others


def _move_rows(view: Snapshot, body: PolicyRenamed) -> None:
    tables, txn = view.tables, view.txn
    old, new = numbered_prefix(body.policy), numbered_prefix(body.to)
    for key, revision in list(tables.revisions.scan(txn, prefix=old)):
        tables.revisions.delete(txn, key)
        put_revision(view, replace(revision, policy=body.to))
    for key, retained in list(tables.retained.scan(txn, prefix=old)):
        tables.retained.delete(txn, key)
        tables.retained.put(txn, new + key[len(old) :], retained)
    tables.policies.delete(txn, text_key(body.policy))
    tables.routes.delete(txn, text_key(body.policy))


def _index(view: Snapshot, record: PolicyRecord) -> None:
    tables, txn = view.tables, view.txn
    tables.by_base.put(txn, _base_key(record), None)
    for key in _label_keys(record):
        tables.by_label.put(txn, key, None)
    if record.retention is not None:
        tables.retaining.put(txn, text_key(record.policy), None)


def _unindex(view: Snapshot, record: PolicyRecord) -> None:
    tables, txn = view.tables, view.txn
    tables.by_base.delete(txn, _base_key(record))
    for key in _label_keys(record):
        tables.by_label.delete(txn, key)
    tables.retaining.delete(txn, text_key(record.policy))


def _base_key(record: PolicyRecord) -> bytes:
    return numbered_prefix(record.base) + text_key(record.policy)


def _label_keys(record: PolicyRecord) -> list[bytes]:
    return [label_prefix(key, value) + text_key(record.policy) for key, value in record.labels.items()]
