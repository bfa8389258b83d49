"""Decisions on policies as a whole: their beginning and end, their names and their labels."""

from __future__ import annotations

from wire.events import (
    ForwardDropped,
    LabelsChanged,
    PolicyCreated,
    PolicyRenamed,
    PolicyRestored,
    PolicyRetired,
    WriterChanged,
)
from wire.outcomes import InvalidRequest, NotFound, VersionConflict
from wire.registrar import (
    ChangeLabels,
    ClaimPolicy,
    CreatePolicy,
    DropForward,
    RenamePolicy,
    RestorePolicy,
    RetirePolicy,
)

from .. import inputs
from ..names import check_base, check_policy
from ..records import PolicyRecord
from ..snapshot import Snapshot
from .common import any_policy, expect_version, known_base, live_policy, must_be_over, must_live
from .decision import Context, Decision


def create(command: CreatePolicy, context: Context) -> Decision:
    check_policy(command.policy)
    check_base(command.base)
    view = context.view
    known = view.policy(command.policy)
    if known is None:
        name_is_free(command.policy, view, "policy")
        known_base(command.base, view, "base")
        return Decision((PolicyCreated(command.policy, command.base),), command.policy)
    must_live(known)
    must_be_over(known, command.base, "base")
    return Decision((), command.policy, known.latest)


def retire(command: RetirePolicy, context: Context) -> Decision:
    known = any_policy(command.policy, context.view)
    if known.retired:
        return _done(known)
    expect_version(known.policy, known, command.expected_version)
    return Decision((PolicyRetired(known.policy),), known.policy, known.latest)


def restore(command: RestorePolicy, context: Context) -> Decision:
    known = any_policy(command.policy, context.view)
    if not known.retired:
        return _done(known)
    expect_version(known.policy, known, command.expected_version)
    return Decision((PolicyRestored(known.policy),), known.policy, known.latest)


def rename(command: RenamePolicy, context: Context) -> Decision:
    known = live_policy(command.policy, context.view, command.expected_version)
    check_policy(command.to, "to")
    if command.to == known.policy:
        return _done(known)
    tenant = known.policy.partition("/")[0]
    if command.to.partition("/")[0] != tenant:
        raise InvalidRequest(f"{known.policy} stays in tenant {tenant}: publish it anew in another", field="to")
    # back to a former name is fine: the two then change places
    if command.to not in known.former:
        name_is_free(command.to, context.view, "to")
        if len(known.former) >= inputs.MAX_FORWARDS:
            raise InvalidRequest(
                f"{inputs.MAX_FORWARDS} names forward to {known.policy} already: drop one first", field="to"
            )
    return Decision((PolicyRenamed(known.policy, command.to),), command.to, known.latest)


def drop_forward(command: DropForward, context: Context) -> Decision:
    known = any_policy(command.policy, context.view)
    check_policy(command.name, "name")
    expect_version(known.policy, known, command.expected_version)
    if command.name not in known.former:
        raise NotFound(f"{command.name} does not forward to {known.policy}", field="name")
    return Decision((ForwardDropped(known.policy, command.name),), known.policy, known.latest)


def change_labels(command: ChangeLabels, context: Context) -> Decision:
    known = live_policy(command.policy, context.view, command.expected_version)
    inputs.check_labels(command.labels, command.remove)
    labels = {key: value for key, value in command.labels.items() if known.labels.get(key) != value}
    removed = tuple(key for key in command.remove if key in known.labels)
    if not labels and not removed:
        return _done(known)
    if len((known.labels.keys() | labels.keys()) - set(removed)) > inputs.MAX_LABELS:
        raise InvalidRequest(f"a policy may have {inputs.MAX_LABELS} labels", field="labels")
    return Decision((LabelsChanged(known.policy, labels, removed),), known.policy, known.latest)


def claim(command: ClaimPolicy, context: Context) -> Decision:
    known = live_policy(command.policy, context.view, None)
    inputs.check_writer(command.writer)
    if known.writer == command.writer:
        return _done(known)
    return Decision((WriterChanged(known.policy, command.writer),), known.policy, known.latest)


def name_is_free(name: str, view: Snapshot, field: str) -> None:
    """Raises VersionConflict where a policy has this name, or had it and it forwards."""
    if view.policy(name) is not None:
        raise VersionConflict(f"there is a policy {name} already", field=field)
    forwarded = view.forward(name)
    if forwarded is not None:
        raise VersionConflict(f"{name} forwards to {forwarded}: drop that first", field=field)


def _done(known: PolicyRecord) -> Decision:
    return Decision((), known.policy, known.latest)
