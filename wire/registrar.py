"""What is asked of the registrar, and what it answers. A command is checked and becomes at most one event.

A publish that creates its policy is two, in one transaction.
"""

from __future__ import annotations

import msgspec

from .events import ArtifactFacts, Event, Provenance, Scope, Split
from .outcomes import Outcome


class Command(msgspec.Struct, frozen=True, tag=True, tag_field="t", omit_defaults=True, kw_only=True):
    """Base of all commands. ``actor`` is the key id (or host user) that asked, for the history.

    ``expected_version``, where given, must equal the policy's version, or the answer is a version conflict.
    """

    actor: str = ""


class AddBase(Command, frozen=True, kw_only=True):
    """Idempotent: the same name with the same fingerprint is an acknowledgement, another fingerprint a conflict.

    With the same fingerprint, another path, config or group replaces the former: a base's files may move.
    """

    name: str
    fingerprint: str
    path: str
    config: bytes
    group: str = ""


class CreatePolicy(Command, frozen=True, kw_only=True):
    """Idempotent for the same base; a name in use over another base is a version conflict."""

    policy: str
    base: str


class PublishRevision(Command, frozen=True, kw_only=True):
    """The artifact must lie in the store. Publishing the digest that ``latest`` has returns that revision.

    With ``create_over`` set, a policy that does not exist yet is created over that base first.
    """

    policy: str
    artifact: ArtifactFacts
    provenance: Provenance = Provenance()
    create_over: str = ""
    expected_version: int | None = None


class MoveChannel(Command, frozen=True, kw_only=True):
    """Point a channel at a revision or a weighted split; an empty target follows ``latest``."""

    policy: str
    channel: str
    target: tuple[Split, ...] = ()
    expected_version: int | None = None


class Rollback(Command, frozen=True, kw_only=True):
    """Point ``channel`` at ``to``, or where ``to`` is 0 at the revision before the one it has now."""

    policy: str
    channel: str = "stable"
    to: int = 0
    expected_version: int | None = None


class RemoveChannel(Command, frozen=True, kw_only=True):
    policy: str
    channel: str
    expected_version: int | None = None


class RetirePolicy(Command, frozen=True, kw_only=True):
    policy: str
    expected_version: int | None = None


class CreateKey(Command, frozen=True, kw_only=True):
    key_id: str
    key_hash: str
    tenant: str
    scopes: tuple[Scope, ...]
    label: str = ""


class RevokeKey(Command, frozen=True, kw_only=True):
    key_id: str


class CollectOrphans(Command, frozen=True, kw_only=True):
    """Remove artifacts and partial uploads that no event names and that are older than ``older_than_s``."""

    older_than_s: float = 3600.0


class ReadJournal(Command, frozen=True, kw_only=True):
    """Events after ``after``, at most ``limit``: how a follower repairs a gap."""

    after: int
    limit: int = 1000


AnyCommand = (
    AddBase
    | CreatePolicy
    | PublishRevision
    | MoveChannel
    | Rollback
    | RemoveChannel
    | RetirePolicy
    | CreateKey
    | RevokeKey
    | CollectOrphans
    | ReadJournal
)


class Answer(msgspec.Struct, frozen=True, tag=True, tag_field="t", omit_defaults=True, kw_only=True):
    """Base of all answers of the registrar."""


class Committed(Answer, frozen=True, kw_only=True):
    """Acknowledged: fsynced before this was sent. ``seq`` is the journal position that has the effect.

    ``changed`` is false where the command found its effect already there.
    ``policy`` and ``revision`` say what is now named; ``version`` is the policy's version after it.
    """

    seq: int
    changed: bool = True
    policy: str = ""
    revision: int = 0
    digest: str = ""
    version: int = 0


class Collected(Answer, frozen=True, kw_only=True):
    removed: int
    bytes: int


class JournalSlice(Answer, frozen=True, kw_only=True):
    """``last`` is the newest position of the journal, whether or not it is in ``events``."""

    events: tuple[Event, ...]
    last: int


class Refusal(Answer, frozen=True, kw_only=True):
    """Nothing was changed. The same shape as wire.outcomes.RoostError."""

    outcome: Outcome
    message: str
    field: str | None = None
    retry_after_s: float | None = None


AnyAnswer = Committed | Collected | JournalSlice | Refusal
