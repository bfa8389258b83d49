"""Decisions on revisions: publishing, and taking single ones back."""

from __future__ import annotations

from wire.events import AnyEvent, ArtifactFacts, PolicyCreated, RevisionPublished, RevisionRestored, RevisionsRetired
from wire.outcomes import ArtifactUnavailable, InvalidRequest, VersionConflict
from wire.registrar import PublishRevision, RestoreRevision, RetireRevision

from .. import inputs
from ..names import check_base, check_policy
from .common import (
    expect_version,
    held_by,
    known_base,
    known_revision,
    live_policy,
    must_be_over,
    must_live,
    must_write,
    no_policy,
)
from .decision import Context, Decision
from .retention import keeps


def publish(command: PublishRevision, context: Context) -> Decision:
    view = context.view
    check_policy(command.policy)
    facts = command.artifact
    inputs.check_facts(facts)
    inputs.check_provenance(command.provenance)
    created: tuple[AnyEvent, ...] = ()
    known = view.followed(command.policy)
    name = known.policy if known else command.policy
    if known is None:
        if not command.create_over:
            raise no_policy(name)
        check_base(command.create_over, "create_over")
        known_base(command.create_over, view, "create_over")
        created = (PolicyCreated(name, command.create_over),)
    else:
        must_live(known)
        if command.create_over:
            must_be_over(known, command.create_over, "create_over")
    expect_version(name, known, command.expected_version)
    check_artifact(facts, context)
    latest = known.latest if known else 0
    newest = view.revision(name, latest) if latest else None
    if newest is not None and newest.artifact.digest == facts.digest:
        return Decision((), name, latest, facts.digest)
    if command.writer and known is not None:
        must_write(known, command.writer)
    number = latest + 1
    published = RevisionPublished(name, number, facts, command.provenance)
    return Decision((*created, published), name, number, facts.digest)


def retire(command: RetireRevision, context: Context) -> Decision:
    view = context.view
    known = live_policy(command.policy, view, command.expected_version)
    record = known_revision(known, command.revision, view, "revision")
    named = Decision((), known.policy, command.revision, record.artifact.digest)
    if record.retired_ms:
        return named
    holder = held_by(known).get(command.revision)
    if holder is not None:
        raise VersionConflict(f"{known.policy}:{holder} points to revision {command.revision}", field="revision")
    for retained in view.retained(known.policy):
        if retained.record.revision == command.revision:
            raise VersionConflict(
                f"the {retained.record.kind} {retained.record.uri} names revision {command.revision}: release it first",
                field="revision",
            )
    retired = RevisionsRetired(known.policy, (command.revision,))
    return Decision((retired,), known.policy, command.revision, record.artifact.digest, 1)


def restore(command: RestoreRevision, context: Context) -> Decision:
    view = context.view
    known = live_policy(command.policy, view, command.expected_version)
    record = known_revision(known, command.revision, view, "revision")
    digest = record.artifact.digest
    if not record.retired_ms:
        return Decision((), known.policy, command.revision, digest)
    if not keeps(known, record, context):
        raise VersionConflict(
            f"the retention of {known.policy} would retire revision {command.revision} again: change it first",
            field="revision",
        )
    check_artifact(record.artifact, context)
    return Decision((RevisionRestored(known.policy, command.revision),), known.policy, command.revision, digest, 1)


def check_artifact(facts: ArtifactFacts, context: Context) -> None:
    """Bytes first: what an event names is in the store, and the same bytes always have the same facts."""
    check_known_facts(facts, context)
    size = context.store.size(facts.digest)
    if size is None:
        raise ArtifactUnavailable(f"artifact {facts.digest} is not in the store: upload it first", field="digest")
    if size != facts.size:
        raise ArtifactUnavailable(
            f"artifact {facts.digest} has {size} bytes in the store, not {facts.size}", field="size"
        )


def check_known_facts(facts: ArtifactFacts, context: Context) -> None:
    """What holds for artifacts that nobody looks for, too: the same bytes always have the same facts, and none is named
    while it is removed. Raises InvalidRequest and ArtifactUnavailable."""
    if context.store.removing(facts.digest):
        raise ArtifactUnavailable(
            f"artifact {facts.digest} is being removed, for nothing named it: upload it again",
            field="digest", retry_after_s=1.0,
        )  # fmt: skip
    known = context.view.artifact(facts.digest)
    if known is not None and known.facts != facts:
        raise InvalidRequest(
            f"artifact {facts.digest} is in the catalog with other facts: {known.facts}", field="artifact"
        )
