"""Events of revisions, and of the artifacts that they name or no longer name."""

from __future__ import annotations

from wire.events import (
    ArtifactFacts,
    ArtifactsCondemned,
    ArtifactsRemoved,
    Event,
    PolicyCreated,
    RevisionPublished,
    RevisionRestored,
    RevisionsRetired,
)

from ..layout import digest_key, text_key
from ..records import ArtifactRecord, PolicyRecord, RevisionRecord
from ..snapshot import Snapshot
from . import policies
from .common import damaged, policy_of, put_policy, put_revision, replace, revision_of


def publish(view: Snapshot, event: Event, body: RevisionPublished) -> None:
    _publish_to(view, event, body, policy_of(view, event, body.policy))


def publish_first(view: Snapshot, created: Event, published: Event) -> None:
    """Record and apply a policy's first two events: the rows are those that one after the other would leave."""
    assert isinstance(created.body, PolicyCreated)
    assert isinstance(published.body, RevisionPublished)
    view.record(created)
    view.record_after(published, created.seq)
    _publish_to(view, published, published.body, policies.new_policy(view, created, created.body, version=1))


def retire(view: Snapshot, event: Event, body: RevisionsRetired) -> None:
    record = policy_of(view, event, body.policy)
    for number in body.revisions:
        revision = revision_of(view, event, body.policy, number)
        if revision.retired_ms:
            raise damaged(event, f"revision {number} of {body.policy} is retired already")
        # 0 would mean that it is not retired
        put_revision(view, replace(revision, retired_ms=max(event.at_ms, 1)))
        _unname_artifact(view, event, revision.artifact.digest)
    put_policy(view, event, record)


def restore(view: Snapshot, event: Event, body: RevisionRestored) -> None:
    record = policy_of(view, event, body.policy)
    revision = revision_of(view, event, body.policy, body.revision)
    _name_artifact(view, event, revision.artifact)
    put_revision(view, replace(revision, retired_ms=0))
    put_policy(view, event, record)


def condemn(view: Snapshot, event: Event, body: ArtifactsCondemned) -> None:
    for digest in body.digests:
        condemned = replace(_artifact(view, event, digest), condemned_ms=max(event.at_ms, 1))
        view.tables.artifacts.put(view.txn, digest_key(digest), condemned)


def remove(view: Snapshot, event: Event, body: ArtifactsRemoved) -> None:
    for digest in body.digests:
        if _artifact(view, event, digest).revisions:
            raise damaged(event, f"artifact {digest} is named")
        view.tables.artifacts.delete(view.txn, digest_key(digest))
        view.tables.unnamed.delete(view.txn, text_key(digest))


def _publish_to(view: Snapshot, event: Event, body: RevisionPublished, record: PolicyRecord) -> None:
    # a revision's facts are read from its artifact, so that one comes first
    _name_artifact(view, event, body.artifact)
    revision = RevisionRecord(
        body.policy, body.revision, body.artifact, body.provenance, event.actor, event.at_ms, event.seq
    )
    put_revision(view, revision)
    before = policies.served_before_publish(record) if record.before else record.before
    put_policy(view, event, replace(record, latest=body.revision, before=before))


def _name_artifact(view: Snapshot, event: Event, facts: ArtifactFacts) -> None:
    """One more revision names it; if it was condemned, it no longer is."""
    key = digest_key(facts.digest)
    known = view.artifact(facts.digest)
    if known is None:
        view.tables.artifacts.put(view.txn, key, ArtifactRecord(facts, event.at_ms, event.seq))
        return
    view.tables.artifacts.put(view.txn, key, replace(known, revisions=known.revisions + 1, condemned_ms=0))
    if not known.revisions:
        view.tables.unnamed.delete(view.txn, text_key(facts.digest))


def _unname_artifact(view: Snapshot, event: Event, digest: str) -> None:
    known = _artifact(view, event, digest)
    view.tables.artifacts.put(view.txn, digest_key(digest), replace(known, revisions=known.revisions - 1))
    if known.revisions == 1:
        view.tables.unnamed.put(view.txn, text_key(digest), None)


def _artifact(view: Snapshot, event: Event, digest: str) -> ArtifactRecord:
    known = view.artifact(digest)
    if known is None:
        raise damaged(event, f"there is no artifact {digest}")
    return known
