"""Journalled events: the only way a fact enters the catalog, and what followers are sent."""

from __future__ import annotations

import enum

import msgspec


class Scope(enum.StrEnum):
    """What an API key may do within its tenant. ``admin`` includes the others and, for tenant ``*``, all tenants."""

    INVOKE = "invoke"
    PUBLISH = "publish"
    ADMIN = "admin"


class EventBody(msgspec.Struct, frozen=True, tag=True, tag_field="t", omit_defaults=True, gc=False):
    """Base of all event bodies; the tag is the class name."""


class Provenance(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Where a revision came from. Never part of its digest."""

    source: str = ""
    format: str = ""
    run: str = ""
    step: int = 0
    note: str = ""


class ArtifactFacts(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What the catalog knows of a revision file without opening it. Size in bytes of the file."""

    digest: str
    size: int
    rank: int
    targets: tuple[str, ...]
    dtype: str
    tensors: int
    parameters: int


class Split(msgspec.Struct, frozen=True):
    """One arm of a channel: a revision number and its weight (relative, positive)."""

    revision: int
    weight: int = 1


class Retention(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which revisions of a policy are kept: the newest ``keep_last``, and those younger than ``keep_days`` days.

    What a channel points to, a training record names or a node holds is kept in any case.
    """

    keep_last: int
    keep_days: float = 0.0


class RecordKind(enum.StrEnum):
    """What a training record stands for: a state that a trainer restores, or samples of one fixed revision."""

    CHECKPOINT = "checkpoint"
    ROLLOUT = "rollout"


class TrainingRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something outside the catalog that a policy keeps hold of until it is released; named by kind and ``uri``.

    ``digest`` of its bytes as its writer states it; ``step`` of the training run; ``revision`` that came of the
    checkpoint or made the rollout, 0 for none.
    """

    kind: RecordKind
    uri: str
    digest: str = ""
    step: int = 0
    revision: int = 0


class BaseAdded(EventBody, frozen=True):
    """A base model was registered. ``config`` is its config.json, ``path`` where an engine loads it from.

    ``fingerprint`` (blake3 hex) covers config, tokenizer and the digests of the weight files.
    """

    name: str
    fingerprint: str
    path: str
    config: bytes
    group: str = ""


class PolicyCreated(EventBody, frozen=True):
    policy: str
    base: str


class RevisionPublished(EventBody, frozen=True):
    """A revision became nameable: its bytes were in the store, verified and fsynced, before this event."""

    policy: str
    revision: int
    artifact: ArtifactFacts
    provenance: Provenance = Provenance()


class ChannelMoved(EventBody, frozen=True):
    """A channel points to ``target`` from now on; an empty target means: follow ``latest`` again.

    ``seed`` decides which users and sessions take which arm of a split. ``replaced`` is what the channel served until
    now, where a rollback is to find it: not where it is what a rollback leaves, or the channel is new. ``undone`` is
    how many former targets a rollback has used up.
    """

    policy: str
    channel: str
    target: tuple[Split, ...] = ()
    seed: int = 0
    replaced: tuple[Split, ...] = ()
    undone: int = 0


class ChannelRemoved(EventBody, frozen=True):
    policy: str
    channel: str


class PolicyRetired(EventBody, frozen=True):
    policy: str


class PolicyRestored(EventBody, frozen=True):
    policy: str


class PolicyRenamed(EventBody, frozen=True):
    """``policy`` is called ``to`` from now on, and the former name forwards to it until that is dropped."""

    policy: str
    to: str


class ForwardDropped(EventBody, frozen=True):
    """``name`` stands for ``policy`` no more, and is free."""

    policy: str
    name: str


class LabelsChanged(EventBody, frozen=True):
    policy: str
    labels: dict[str, str] = {}
    removed: tuple[str, ...] = ()


class WriterChanged(EventBody, frozen=True):
    """``writer`` is the training run that publishes to ``policy`` from now on, and no other run does."""

    policy: str
    writer: str


class RetentionChanged(EventBody, frozen=True):
    """Without a ``retention`` every revision is kept."""

    policy: str
    retention: Retention | None = None


class RevisionsRetired(EventBody, frozen=True):
    """These revisions can't be named any more; their bytes go once nothing else names them."""

    policy: str
    revisions: tuple[int, ...]


class RevisionRestored(EventBody, frozen=True):
    policy: str
    revision: int


class RecordRetained(EventBody, frozen=True):
    policy: str
    record: TrainingRecord


class RecordReleased(EventBody, frozen=True):
    policy: str
    kind: RecordKind
    uri: str


class ArtifactsCondemned(EventBody, frozen=True):
    """No revision names these artifacts: they go after a time of grace, unless one names them again."""

    digests: tuple[str, ...]


class ArtifactsRemoved(EventBody, frozen=True):
    """The catalog knows nothing of these artifacts any more; their bytes are removed after this event."""

    digests: tuple[str, ...]


class KeyCreated(EventBody, frozen=True):
    """``key_hash`` is the sha256 (hex) of the secret, which is shown once and never stored."""

    key_id: str
    key_hash: str
    tenant: str
    scopes: tuple[Scope, ...]
    label: str = ""


class KeyRevoked(EventBody, frozen=True):
    key_id: str


AnyEvent = (
    BaseAdded
    | PolicyCreated
    | RevisionPublished
    | ChannelMoved
    | ChannelRemoved
    | PolicyRetired
    | KeyCreated
    | KeyRevoked
    | PolicyRestored
    | PolicyRenamed
    | ForwardDropped
    | LabelsChanged
    | RetentionChanged
    | RevisionsRetired
    | RevisionRestored
    | RecordRetained
    | RecordReleased
    | ArtifactsCondemned
    | ArtifactsRemoved
    | WriterChanged
)


class Event(msgspec.Struct, frozen=True, gc=False):
    """One line of the journal. ``seq`` starts at 1 and has no gaps; ``at_ms`` is Unix time in milliseconds."""

    seq: int
    at_ms: int
    actor: str
    body: AnyEvent
