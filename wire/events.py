"""Journalled events: the only way a fact enters the catalog, and what followers are sent."""

from __future__ import annotations

import enum

import msgspec


class Scope(enum.StrEnum):
    """What an API key may do within its tenant. ``admin`` includes the others and, for tenant ``*``, all tenants."""

    INVOKE = "invoke"
    PUBLISH = "publish"
    ADMIN = "admin"


class EventBody(msgspec.Struct, frozen=True, tag=True, tag_field="t", omit_defaults=True):
    """Base of all event bodies; the tag is the class name."""


class Provenance(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a revision came from. Never part of its digest."""

    source: str = ""
    format: str = ""
    run: str = ""
    step: int = 0
    note: str = ""


class ArtifactFacts(msgspec.Struct, frozen=True, omit_defaults=True):
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
    """A channel points to ``target`` from now on; an empty target means: follow ``latest`` again."""

    policy: str
    channel: str
    target: tuple[Split, ...] = ()


class ChannelRemoved(EventBody, frozen=True):
    policy: str
    channel: str


class PolicyRetired(EventBody, frozen=True):
    policy: str


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
)


class Event(msgspec.Struct, frozen=True):
    """One line of the journal. ``seq`` starts at 1 and has no gaps; ``at_ms`` is Unix time in milliseconds."""

    seq: int
    at_ms: int
    actor: str
    body: AnyEvent
