"""Decisions on which revisions of a policy are kept."""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import islice

from wire.events import AnyEvent, Retention, RetentionChanged, RevisionsRetired
from wire.registrar import PruneNext, PruneRevisions, SetRetention

from .. import inputs
from ..records import PolicyRecord, RevisionRecord
from .common import any_policy, expect_version, held_by, live_policy
from .decision import Context, Decision

_DAY_MS = 86_400_000
# one event of it stays far below a message's bound; the rest goes at the next pruning
_MOST_AT_ONCE = 1000
# revisions that one step looks at, before it leaves the other policies to the next
_ROWS_A_STEP = 10_000


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
    """``in_use`` has no bound here: the registrar itself is who asks, with what gateways told it."""
    inputs.check_step(command.limit)
    in_use = frozenset(command.in_use)
    events: list[AnyEvent] = []
    count = rows = 0
    last = ""
    for name in islice(context.view.names_with_retention(after=command.after), command.limit):
        known = any_policy(name, context.view)
        numbers = prunable(known, context, in_use)
        if numbers:
            events.append(RevisionsRetired(name, numbers))
            count += len(numbers)
        rows += known.latest
        last = name
        if rows >= _ROWS_A_STEP:
            break
    return Decision(tuple(events), last, count=count)


def prunable(known: PolicyRecord, context: Context, in_use: frozenset[str]) -> tuple[int, ...]:
    """The revisions that the policy's retention does not keep, oldest first, a bounded number of them."""
    retention = known.retention
    if retention is None:
        return ()
    view = context.view
    live = [(number, digest) for number, digest, retired_ms in view.heads(known.policy) if not retired_ms]
    kept = held_by(known).keys() | {retained.record.revision for retained in view.retained(known.policy)}
    return tuple(islice(_gone(known, live[: -retention.keep_last], kept, in_use, context), _MOST_AT_ONCE))


def _gone(
    known: PolicyRecord, old: list[tuple[int, str]], kept: Set[int], in_use: frozenset[str], context: Context
) -> Iterator[int]:
    """Of the live revisions that are not among the last ones: those that nothing else keeps."""
    assert known.retention is not None
    too_young = _youngest_to_go(known.retention, context.now_ms)
    for number, digest in old:
        if number in kept or digest in in_use:
            continue
        record = context.view.revision(known.policy, number)
        # revisions are published in the order of their numbers
        if record is None or record.published_ms > too_young:
            return
        yield number


def keeps(known: PolicyRecord, record: RevisionRecord, context: Context) -> bool:
    """Whether the policy's retention would keep this retired revision if it were none."""
    retention = known.retention
    if retention is None or record.published_ms > _youngest_to_go(retention, context.now_ms):
        return True
    if any(retained.record.revision == record.revision for retained in context.view.retained(known.policy)):
        return True
    newer = sum(
        number > record.revision and not retired_ms for number, _, retired_ms in context.view.heads(known.policy)
    )
    return newer < retention.keep_last


def _youngest_to_go(retention: Retention, now_ms: int) -> int:
    return now_ms - int(retention.keep_days * _DAY_MS)
