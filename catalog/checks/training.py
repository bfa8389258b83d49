"""Decisions on training records: the checkpoints and rollouts that a policy keeps hold of."""

from __future__ import annotations

from wire.events import RecordReleased, RecordRetained
from wire.outcomes import InvalidRequest, NotFound
from wire.registrar import ReleaseRecord, RetainRecord

from .. import inputs
from .common import any_policy, expect_version, live_policy, live_revision
from .decision import Context, Decision


def retain(command: RetainRecord, context: Context) -> Decision:
    view = context.view
    known = live_policy(command.policy, view, command.expected_version)
    record = command.record
    inputs.check_training_record(record)
    if record.revision:
        live_revision(known, record.revision, view, "revision")
    former = view.retained_record(known.policy, record.kind, record.uri)
    if former is not None and former.record == record:
        return Decision((), known.policy, record.revision)
    if former is None and len(view.retained(known.policy)) >= inputs.MAX_TRAINING_RECORDS:
        raise InvalidRequest(
            f"{known.policy} keeps hold of {inputs.MAX_TRAINING_RECORDS} training records already: release some",
            field="policy",
        )
    return Decision((RecordRetained(known.policy, record),), known.policy, record.revision)


def release(command: ReleaseRecord, context: Context) -> Decision:
    """Also of a policy that is retired."""
    view = context.view
    known = any_policy(command.policy, view)
    expect_version(known.policy, known, command.expected_version)
    inputs.check_uri(command.uri)
    if view.retained_record(known.policy, command.kind, command.uri) is None:
        raise NotFound(f"{known.policy} has no {command.kind} {command.uri}", field="uri")
    return Decision((RecordReleased(known.policy, command.kind, command.uri),), known.policy)
