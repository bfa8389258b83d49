"""The view's records as they lie in LMDB: typed MessagePack, positional, so a field is only ever added at the end."""

from __future__ import annotations

import msgspec

from wire.events import ArtifactFacts, Provenance, Retention, Scope, Split, TrainingRecord

from .names import STABLE


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Base of all records of the view."""


class BaseRecord(Record, frozen=True):
    """A base model. ``config`` is its config.json, ``path`` where an engine loads it from."""

    name: str
    fingerprint: str
    path: str
    config: bytes
    group: str
    created_ms: int


class PolicyRecord(Record, frozen=True, gc=False):
    """A policy as people look at it. ``latest`` is 0 before the first revision.

    ``version`` counts the events of the policy and starts at 1. A channel with an empty target follows ``latest``;
    ``stable`` is always among the channels, ``latest`` never. ``seeds`` has those of the channels that are split or
    were, but for seed 0. ``former`` are the names that forward to it. ``seq`` is the position of its last event.
    ``before`` has what channels served before, newest last, for rollbacks: of channels that were never moved, nothing.
    ``writer`` is the training run that publishes to it, empty where none has claimed it.
    """

    policy: str
    base: str
    latest: int
    version: int
    channels: dict[str, tuple[Split, ...]]
    retired: bool
    created_ms: int
    seq: int = 0
    seeds: dict[str, int] = {}
    labels: dict[str, str] = {}
    former: tuple[str, ...] = ()
    retention: Retention | None = None
    before: dict[str, tuple[tuple[Split, ...], ...]] = {}
    writer: str = ""


class RevisionRecord(Record, frozen=True, gc=False):
    """One immutable revision of a policy. ``seq`` is the journal position of the event that published it."""

    policy: str
    revision: int
    artifact: ArtifactFacts
    provenance: Provenance
    actor: str
    published_ms: int
    seq: int
    retired_ms: int = 0


class RevisionHead(Record, frozen=True):
    """Of a revision's packed record, what a request needs."""

    digest: bytes
    retired_ms: int
    size: int
    rank: int
    targets: tuple[str, ...]


class ArtifactRecord(Record, frozen=True, gc=False):
    """A revision file that at least one event names. ``seq`` is the first such event.

    ``revisions`` counts those that name it and are not retired. ``condemned_ms`` is 0 unless it waits for removal.
    """

    facts: ArtifactFacts
    named_ms: int
    seq: int
    revisions: int = 1
    condemned_ms: int = 0


class RetainedRecord(Record, frozen=True):
    """A training checkpoint or a rollout that a policy keeps hold of, and who said so when."""

    record: TrainingRecord
    actor: str
    retained_ms: int
    seq: int


class KeyRecord(Record, frozen=True):
    """An API key; ``key_hash`` is the sha256 (hex) of a secret that is stored nowhere."""

    key_id: str
    key_hash: str
    tenant: str
    scopes: tuple[Scope, ...]
    label: str
    revoked: bool
    created_ms: int


class Arm(Record, frozen=True, gc=False):
    """A revision as a request needs it, and its weight within the channel that points to it. The digest is raw."""

    revision: int
    digest: bytes
    size: int
    rank: int
    targets: tuple[str, ...]
    weight: int = 1


class RouteRecord(Record, frozen=True, gc=False):
    """Everything that a request for a policy needs, in one record. Channels with no arms follow ``latest``.

    ``seeds`` are those of the channels that are split or were, but for seed 0.
    """

    base: str
    retired: bool
    latest: Arm | None
    channels: dict[str, tuple[Arm, ...]] = msgspec.field(default_factory=lambda: {STABLE: ()})
    seeds: dict[str, int] = {}
