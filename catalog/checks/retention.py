"""Decisions on which revisions of a policy are kept."""

from __future__ import annotations

from itertools import islice

from wire.events import AnyEvent, Retention, RetentionChanged, RevisionsRetired
from wire.registrar import PruneNext, PruneRevisions, SetRetention

from .. import inputs
from ..records import PolicyRecord
from .common import any_policy, expect_version, held_by, live_policy
from .decision import Context, Decision

_DAY_MS = 86_400_000
# one event of it stays far below a message's bound; the rest goes at the next pruning
_MOST_AT_ONCE = 1000


def set_retention(command: SetRetention, context: Context) -> Decision:
    known = live_policy(command.policy, context.view, command.expected_version)
    if command.retention is not None:
        inputs.check_retention(command.retention)
    if command.retention == known.retention:
        return Decision((), known.policy, known.latest)
    return Decision((RetentionChanged(known.policy, command.retention),), known.policy, known.latest)


def prune(command: PruneRevisions, context: Context) -> Decision:
    """Also of a policy that is retired, whose revisions none but its channels hold."""
    inputs.check_digests(command.in_use)
    known = any_policy(command.policy, context.view)
    expect_version(known.policy, known, command.expected_version)
    numbers = prunable(known, context, frozenset(command.in_use))
    events = (RevisionsRetired(known.policy, numbers),) if numbers else ()
    return Decision(events, known.policy, known.latest, count=len(numbers))


def prune_next(command: PruneNext, context: Context) -> Decision:
    inputs.check_digests(command.in_use)
    inputs.check_step(command.limit)
    in_use = frozenset(command.in_use)
    names = list(islice(context.view.names_with_retention(after=command.after), command.limit))
    events: list[AnyEvent] = []
    count = 0
    for name in names:
        numbers = prunable(any_policy(name, context.view), context, in_use)
        if numbers:
            events.append(RevisionsRetired(name, numbers))
            count += len(numbers)
    return Decision(tuple(events), names[-1] if len(names) == command.limit else "", count=count)


def prunable(known: PolicyRecord, context: Context, in_use: frozenset[str]) -> tuple[int, ...]:
    """The revisions that the policy's retention does not keep, oldest first, a bounded number of them."""
    retention = known.retention
    if retention is None:
        return ()
    view = context.view
    kept = held_by(known).keys() | {retained.record.revision for retained in view.retained(known.policy)}
    live = [record for record in view.all_revisions(known.policy) if not record.retired_ms]
    too_young = _youngest_to_go(retention, context.now_ms)
    old = [record for record in live[: -retention.keep_last] if record.published_ms <= too_young]
    gone = (record.revision for record in old if record.revision not in kept and record.artifact.digest not in in_use)
    return tuple(islice(gone, _MOST_AT_ONCE))


def _youngest_to_go(retention: Retention, now_ms: int) -> int:
    return now_ms - int(retention.keep_days * _DAY_MS)
