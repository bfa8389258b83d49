"""What is asked of the registrar, and what it answers. A command is checked and becomes events, all of
them or none: most one, a first publish two, an import or a clean-up many.

A publish that creates its policy is two, in one transaction.
"""

from __future__ import annotations

import msgspec

from .events import ArtifactFacts, Event, Provenance, RecordKind, Retention, Scope, Split, TrainingRecord
from .outcomes import Outcome


class Command(msgspec.Struct, frozen=True, tag=True, tag_field="t", omit_defaults=True, kw_only=True):
    """Base of all commands. ``actor`` is the key id (or host user) that asked, for the history.

    ``expected_version``, where given, must equal the policy's version, or the answer is a version conflict.
    ``command_id``, where given, is the asker's own for this one command: with the journal in PostgreSQL, the same
    command under the same id is answered with what it came to the first time.
    """

    actor: str = ""
    command_id: str = ""


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

    With ``create_over`` set, a policy that does not exist yet is created over that base first. A training run says that
    it is the ``writer``: where another has claimed the policy since, that is a version conflict.
    """

    policy: str
    artifact: ArtifactFacts
    provenance: Provenance = Provenance()
    create_over: str = ""
    expected_version: int | None = None
    writer: str = ""


class ClaimPolicy(Command, frozen=True, kw_only=True):
    """The training run ``writer`` publishes to the policy from now on, in the place of the one that did. Idempotent."""

    policy: str
    writer: str


class MoveChannel(Command, frozen=True, kw_only=True):
    """Point a channel at a revision or a weighted split; an empty target follows ``latest``.

    A split keeps the ``seed`` that the channel's split has, unless one is given: another seed deals users and
    sessions to the arms anew.
    """

    policy: str
    channel: str
    target: tuple[Split, ...] = ()
    seed: int | None = None
    expected_version: int | None = None


class Promote(Command, frozen=True, kw_only=True):
    """Point ``channel`` at ``revision``, or where that is 0 at the revision that channel ``source`` has now."""

    policy: str
    channel: str = "stable"
    source: str = ""
    revision: int = 0
    expected_version: int | None = None


class Rollback(Command, frozen=True, kw_only=True):
    """Point ``channel`` at ``to``, or where ``to`` is 0 back at what it served before, which may be a split.

    Each rollback goes further back, through at most 8 former targets without those that have retired revisions, and
    then to the next lower revision: as for a channel that only ever followed ``latest``.
    """

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


class RestorePolicy(Command, frozen=True, kw_only=True):
    policy: str
    expected_version: int | None = None


class RenamePolicy(Command, frozen=True, kw_only=True):
    """Give a policy another name within its tenant. The former name forwards, and can't be given to another."""

    policy: str
    to: str
    expected_version: int | None = None


class DropForward(Command, frozen=True, kw_only=True):
    """Free ``name``, which forwards to ``policy``."""

    policy: str
    name: str
    expected_version: int | None = None


class ChangeLabels(Command, frozen=True, kw_only=True):
    """Set some labels and remove others; those that are not named stay."""

    policy: str
    labels: dict[str, str] = {}
    remove: tuple[str, ...] = ()
    expected_version: int | None = None


class SetRetention(Command, frozen=True, kw_only=True):
    """Which revisions to keep; None keeps all."""

    policy: str
    retention: Retention | None = None
    expected_version: int | None = None


class PruneRevisions(Command, frozen=True, kw_only=True):
    """Retire the revisions that the policy's retention does not keep.

    ``in_use`` are digests that nodes hold: what a lease may be using is kept.
    """

    policy: str
    in_use: tuple[str, ...] = ()
    expected_version: int | None = None


class RetireRevision(Command, frozen=True, kw_only=True):
    """Refused while a channel points to it or a training record names it."""

    policy: str
    revision: int
    expected_version: int | None = None


class RestoreRevision(Command, frozen=True, kw_only=True):
    """Undo a retirement, as long as the store still has the bytes, or has them again."""

    policy: str
    revision: int
    expected_version: int | None = None


class RetainRecord(Command, frozen=True, kw_only=True):
    """Keep hold of a training checkpoint or a rollout. The same kind and uri again replaces what was said of it."""

    policy: str
    record: TrainingRecord
    expected_version: int | None = None


class ReleaseRecord(Command, frozen=True, kw_only=True):
    policy: str
    kind: RecordKind
    uri: str
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


class PruneNext(Command, frozen=True, kw_only=True):
    """Prune the policies that have a retention, at most ``limit`` of them, after the name ``after``; fewer where those
    have many revisions.

    The answer's ``policy`` is the last of them, and empty once there are no more.
    """

    after: str = ""
    limit: int = 100
    in_use: tuple[str, ...] = ()


class CondemnArtifacts(Command, frozen=True, kw_only=True):
    """Condemn artifacts that no revision names any more, but none that is ``in_use``: held or fetched by a node.

    Takes the next of them after digest ``after``, at most 1,000; the answer's ``digest`` is the last that it looked at,
    and empty once there are no more.
    """

    after: str = ""
    in_use: tuple[str, ...] = ()


class RemoveArtifacts(Command, frozen=True, kw_only=True):
    """Forget artifacts that were condemned ``grace_s`` ago or earlier and are not ``in_use``, in the same steps.

    Their bytes then belong to nobody, and CollectOrphans removes them.
    """

    after: str = ""
    grace_s: float = 86_400.0
    in_use: tuple[str, ...] = ()


class ReportInUse(Command, frozen=True, kw_only=True):
    """What nodes hold, as ``gateway`` hears from them: retention keeps it. Not journalled.

    A report of many digests comes in ``parts``, of which this is ``part`` (from 0), in order; it counts once the last
    one is there. ``complete`` says that every node of the gateway was heard.
    """

    gateway: str
    digests: tuple[str, ...]
    part: int = 0
    parts: int = 1
    complete: bool = True


class ReadJournal(Command, frozen=True, kw_only=True):
    """Events after ``after``, at most ``limit``: how a follower repairs a gap."""

    after: int
    limit: int = 1000


class AwaitPosition(Command, frozen=True, kw_only=True):
    """Answered once this host's view has every event up to ``seq``; after ``timeout_s`` seconds a deadline passed."""

    seq: int
    timeout_s: float = 10.0


class ImportedRevision(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """One revision of a bulk import. A policy that does not exist yet is created over ``base``.

    ``revision`` is the number that it has or gets, which makes importing it again a check; 0 means the next one,
    unless ``latest`` has this digest.
    """

    policy: str
    base: str
    artifact: ArtifactFacts
    revision: int = 0
    provenance: Provenance = Provenance()


class ImportRevisions(Command, frozen=True, kw_only=True):
    """Publish many revisions at once, all or none; those that are there already are left alone.

    ``external`` artifacts are taken as declared: nobody looks whether the store has them yet.
    """

    revisions: tuple[ImportedRevision, ...]
    external: bool = False


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
    | AwaitPosition
    | Promote
    | RestorePolicy
    | RenamePolicy
    | DropForward
    | ChangeLabels
    | SetRetention
    | PruneRevisions
    | RetireRevision
    | RestoreRevision
    | RetainRecord
    | ReleaseRecord
    | PruneNext
    | CondemnArtifacts
    | RemoveArtifacts
    | ImportRevisions
    | ReportInUse
    | ClaimPolicy
)


class Answer(msgspec.Struct, frozen=True, tag=True, tag_field="t", omit_defaults=True, kw_only=True):
    """Base of all answers of the registrar."""


class Committed(Answer, frozen=True, kw_only=True):
    """Acknowledged: fsynced before this was sent. ``seq`` is the journal position that has the effect.

    ``changed`` is false where the command found its effect already there.
    ``policy`` and ``revision`` say what is now named; ``version`` is the policy's version after it; ``count`` how many
    revisions or artifacts a clean-up concerned, or how many revisions an import published.
    """

    seq: int
    changed: bool = True
    policy: str = ""
    revision: int = 0
    digest: str = ""
    version: int = 0
    count: int = 0


class Collected(Answer, frozen=True, kw_only=True):
    removed: int
    bytes: int


class Noted(Answer, frozen=True, kw_only=True):
    """A report was taken; nothing of it is durable."""


class JournalSlice(Answer, frozen=True, kw_only=True):
    """``last`` is the newest position of the journal, whether or not it is in ``events``."""

    events: tuple[Event, ...]
    last: int


class Reached(Answer, frozen=True, kw_only=True):
    """The view of the host that answers has every event up to ``position``."""

    position: int


class Refusal(Answer, frozen=True, kw_only=True):
    """Nothing was changed. The same shape as wire.outcomes.RoostError."""

    outcome: Outcome
    message: str
    field: str | None = None
    retry_after_s: float | None = None


AnyAnswer = Committed | Collected | JournalSlice | Reached | Noted | Refusal
