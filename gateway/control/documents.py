"""What the admin API answers: each struct is written as it stands, and described from itself."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from catalog.records import PolicyRecord, RetainedRecord, RevisionRecord
from wire.events import Event, Provenance, RecordKind, Retention, Scope, Split
from wire.registrar import Committed

T = TypeVar("T", bound="Document")


class Document(msgspec.Struct, frozen=True):
    """Base of all answers."""

    @classmethod
    def of(cls: type[T], source: Any) -> T:
        """Made of the attributes of ``source`` that have the fields' names."""
        return msgspec.convert(source, cls, from_attributes=True)


class CommittedDocument(Document, frozen=True):
    """``seq`` is the journal position that has the effect; ``changed`` is false where it was there already."""

    seq: int
    changed: bool
    policy: str
    revision: int
    digest: str
    version: int
    count: int

    @classmethod
    def told(cls, committed: Committed) -> CommittedDocument:
        return cls.of(committed)


class PublishedDocument(CommittedDocument, frozen=True):
    """``warnings`` say why the revision, which is named from now on, may not be what requests get."""

    warnings: tuple[str, ...] = ()


class PolicyDocument(Document, frozen=True):
    """A policy. A channel with an empty target follows ``latest``; ``former`` names forward to the policy. ``writer``
    is the training run that publishes to it, empty where none does.
    """

    policy: str
    base: str
    latest: int
    version: int
    channels: dict[str, tuple[Split, ...]]
    seeds: dict[str, int]
    labels: dict[str, str]
    former: tuple[str, ...]
    retention: Retention | None
    retired: bool
    created_ms: int
    writer: str


class RevisionDocument(Document, frozen=True):
    """A revision; sizes in bytes. ``retired_ms`` is 0 for one that can be named."""

    revision: int
    digest: str
    size: int
    rank: int
    targets: tuple[str, ...]
    dtype: str
    tensors: int
    parameters: int
    provenance: Provenance
    actor: str
    published_ms: int
    retired_ms: int

    @classmethod
    def told(cls, record: RevisionRecord) -> RevisionDocument:
        fields = {name: getattr(record.artifact, name) for name in record.artifact.__struct_fields__}
        return cls(
            revision=record.revision, **fields, provenance=record.provenance, actor=record.actor,
            published_ms=record.published_ms, retired_ms=record.retired_ms,
        )  # fmt: skip


class PolicyPage(Document, frozen=True):
    """``after`` is where the next page begins; a page may be empty and yet not the last."""

    policies: list[PolicyDocument]
    has_more: bool
    after: str


class TrainingDocument(Document, frozen=True):
    """A training checkpoint or a rollout that the policy keeps hold of."""

    kind: RecordKind
    uri: str
    digest: str
    step: int
    revision: int
    actor: str
    retained_ms: int

    @classmethod
    def told(cls, retained: RetainedRecord) -> TrainingDocument:
        fields = {name: getattr(retained.record, name) for name in retained.record.__struct_fields__}
        return cls(**fields, actor=retained.actor, retained_ms=retained.retained_ms)


class PolicyWithRevisions(PolicyDocument, frozen=True):
    """``after`` is where the next page of revisions begins; ``checkpoints`` are the newest that a trainer restores."""

    revisions: list[RevisionDocument]
    has_more: bool
    after: int
    checkpoints: list[TrainingDocument]

    @classmethod
    def told(
        cls, record: PolicyRecord, revisions: list[RevisionRecord], after: int, checkpoints: list[TrainingDocument]
    ) -> PolicyWithRevisions:
        policy = {name: getattr(record, name) for name in PolicyDocument.__struct_fields__}
        told = [RevisionDocument.told(row) for row in revisions]
        return cls(**policy, revisions=told, has_more=bool(after), after=after, checkpoints=checkpoints)


class HistoryDocument(Document, frozen=True):
    """Newest first, under whatever name the policy had then. ``actor`` is the key or host user that asked.

    ``after`` is where the next page begins.
    """

    events: list[Event]
    has_more: bool
    after: int


class TrainingList(Document, frozen=True):
    records: list[TrainingDocument]


class Deployment(Document, frozen=True):
    """An engine that runs the policy's base. ``unfit``: revisions, of those told, that are too much for it."""

    node: str
    engine: str
    backend: str
    health: str
    max_rank: int
    unfit: list[int]


class BaseWhere(Document, frozen=True):
    """Which base deployments can run the policy."""

    name: str
    fingerprint: str
    group: str
    deployments: list[Deployment]


class Used(Document, frozen=True):
    """A fixed revision that a channel points to, and its weight where the channel is split."""

    revision: int
    digest: str
    weight: int


class OnNode(Document, frozen=True):
    """Where a node has a revision's bytes, and which of its engines have it in a slot."""

    node: str
    residency: str
    engines: list[str]


class RevisionWhere(Document, frozen=True):
    """Where a revision's bytes are now; ``size`` in bytes."""

    revision: int
    digest: str
    size: int
    in_store: bool
    nodes: list[OnNode]


class WhereDocument(Document, frozen=True):
    """Four questions: which base deployments can run it; which checkpoint a trainer restores; which fixed revisions
    its channels (serving, evaluation) and rollouts use; where the bytes are now. ``after`` is where the next page of
    revisions begins."""

    policy: str
    base: BaseWhere
    checkpoint: TrainingDocument | None
    channels: dict[str, list[Used]]
    rollouts: list[TrainingDocument]
    revisions: list[RevisionWhere]
    has_more: bool
    after: int


class BaseDocument(Document, frozen=True):
    """A base; ``config`` is its config.json, in JSON as base64."""

    name: str
    fingerprint: str
    path: str
    group: str
    created_ms: int


class BaseWithConfig(BaseDocument, frozen=True):
    config: bytes


class BaseList(Document, frozen=True):
    bases: list[BaseDocument]


class NodeDocument(Document, frozen=True):
    """A node as this gateway sees it. ``state`` is ``serving``, ``cordoned`` (nothing new goes there), ``drained`` (nor
    is any request there), ``doubtful`` (its connection broke just now), ``silent`` or ``joining`` (never heard).

    ``leases`` count the requests of all gateways there, ``own_leases`` those of this one; ``slots`` are of its ready
    engines. ``loads_limit`` is how many loads may run at once now, ``load_s`` how many seconds one takes lately and
    ``load_rate`` how many of those that wait start in a second; ``queued_by_tenant`` counts those that wait, of the
    tenants that have most of them. ``arrived_bytes`` counts what came into its arena since its sidecar started, by
    where it came from (``store``, ``disk``, ``peer``, ``trainer``), ``given_bytes`` what went from there to other
    nodes, and ``peer_faults``, by node, how often one gave it wrong bytes.
    """

    node: str
    state: str
    endpoint: str
    bases: tuple[str, ...]
    engines: int
    engines_ready: int
    slots: int
    slots_used: int
    leases: int
    own_leases: int
    loads_in_flight: int
    loads_queued: int
    loads_limit: int
    queued_by_tenant: dict[str, int]
    load_s: float
    load_rate: float
    resident: int
    arrived_bytes: dict[str, int]
    given_bytes: int
    peer_faults: dict[str, int]


class NodeList(Document, frozen=True):
    """``trouble`` says why what the nodes file holds is not in force, or not all of it; empty where it is."""

    nodes: list[NodeDocument]
    trouble: str


class KeyDocument(Document, frozen=True):
    key_id: str
    tenant: str
    scopes: tuple[Scope, ...]
    label: str
    revoked: bool
    created_ms: int


class KeyPage(Document, frozen=True):
    """``after`` is where the next page begins; a page may be empty and yet not the last."""

    keys: list[KeyDocument]
    has_more: bool
    after: str


class NewKeyDocument(Document, frozen=True):
    """``secret`` is shown this once."""

    key_id: str
    secret: str
    tenant: str
    scopes: tuple[Scope, ...]
    label: str


class StoredDocument(Document, frozen=True):
    """An artifact in the store; ``size`` in bytes."""

    digest: str
    size: int


class SweptDocument(Document, frozen=True):
    """Files that were removed, and their bytes."""

    removed: int
    bytes: int


class CollectedDocument(Document, frozen=True):
    """Artifacts that were condemned, and forgotten after their grace; files that were removed, and their bytes."""

    condemned: int
    forgotten: int
    removed: int
    bytes: int


class ErrorDetail(Document, frozen=True):
    """``code`` is the outcome; ``param`` the field that is wrong, where there is one."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorDocument(Document, frozen=True):
    error: ErrorDetail
