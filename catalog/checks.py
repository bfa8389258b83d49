"""Deciding on a command: the events that it becomes, or nothing to do, or a refusal. Reads the view, writes nothing."""

from __future__ import annotations

from typing import Protocol

import msgspec

from wire.events import (
    AnyEvent,
    ArtifactFacts,
    BaseAdded,
    ChannelMoved,
    ChannelRemoved,
    KeyCreated,
    KeyRevoked,
    PolicyCreated,
    PolicyRetired,
    RevisionPublished,
    Split,
)
from wire.outcomes import ArtifactUnavailable, InvalidRequest, NotFound, Retired, VersionConflict
from wire.registrar import (
    AddBase,
    CreateKey,
    CreatePolicy,
    MoveChannel,
    PublishRevision,
    RemoveChannel,
    RetirePolicy,
    RevokeKey,
    Rollback,
)

from . import inputs
from .names import STABLE, check_base, check_policy
from .records import PolicyRecord
from .snapshot import Snapshot

WriteCommand = (
    AddBase
    | CreatePolicy
    | PublishRevision
    | MoveChannel
    | Rollback
    | RemoveChannel
    | RetirePolicy
    | CreateKey
    | RevokeKey
)


class ArtifactSizes(Protocol):
    """What deciding needs of the store."""

    def size(self, digest: str) -> int | None:
        """Bytes of a complete artifact; None where the store hasn't got it."""


class Decision(msgspec.Struct, frozen=True):
    """What a command comes to. No events: its effect is there already. The rest says what is then named."""

    events: tuple[AnyEvent, ...] = ()
    policy: str = ""
    revision: int = 0
    digest: str = ""


def decide(command: WriteCommand, view: Snapshot, store: ArtifactSizes) -> Decision:
    """Raises a RoostError where the command is refused."""
    inputs.check_actor(command.actor)
    match command:
        case AddBase():
            return _add_base(command, view)
        case CreatePolicy():
            return _create_policy(command, view)
        case PublishRevision():
            return _publish(command, view, store)
        case MoveChannel():
            return _move_channel(command, view)
        case Rollback():
            return _rollback(command, view)
        case RemoveChannel():
            return _remove_channel(command, view)
        case RetirePolicy():
            return _retire(command, view)
        case CreateKey():
            return _create_key(command, view)
        case RevokeKey():
            return _revoke_key(command, view)


def _add_base(command: AddBase, view: Snapshot) -> Decision:
    inputs.check_new_base(command)
    body = BaseAdded(command.name, command.fingerprint, command.path, command.config, command.group)
    known = view.base(command.name)
    if known is None:
        return Decision((body,))
    if known.fingerprint != command.fingerprint:
        raise VersionConflict(
            f"base {command.name} is registered with another fingerprint: another model needs another name",
            field="fingerprint",
        )
    same = (known.path, known.config, known.group) == (command.path, command.config, command.group)
    return Decision() if same else Decision((body,))


def _create_policy(command: CreatePolicy, view: Snapshot) -> Decision:
    check_policy(command.policy)
    check_base(command.base)
    known = view.policy(command.policy)
    if known is None:
        _known_base(command.base, view, "base")
        return Decision((PolicyCreated(command.policy, command.base),), command.policy)
    _must_live(known)
    _must_be_over(known, command.base, "base")
    return Decision((), command.policy, known.latest)


def _publish(command: PublishRevision, view: Snapshot, store: ArtifactSizes) -> Decision:
    check_policy(command.policy)
    facts = command.artifact
    inputs.check_facts(facts)
    inputs.check_provenance(command.provenance)
    created: tuple[AnyEvent, ...] = ()
    known = view.policy(command.policy)
    if known is None:
        if not command.create_over:
            raise _no_policy(command.policy)
        check_base(command.create_over, "create_over")
        _known_base(command.create_over, view, "create_over")
        created = (PolicyCreated(command.policy, command.create_over),)
    else:
        _must_live(known)
        if command.create_over:
            _must_be_over(known, command.create_over, "create_over")
    _expect_version(command.policy, known, command.expected_version)
    _check_artifact(facts, view, store)
    latest = known.latest if known else 0
    if latest and _digest(command.policy, latest, view) == facts.digest:
        return Decision((), command.policy, latest, facts.digest)
    number = latest + 1
    published = RevisionPublished(command.policy, number, facts, command.provenance)
    return Decision((*created, published), command.policy, number, facts.digest)


def _check_artifact(facts: ArtifactFacts, view: Snapshot, store: ArtifactSizes) -> None:
    """Bytes first: what an event names is in the store, and the same bytes always have the same facts."""
    known = view.artifact(facts.digest)
    if known is not None and known.facts != facts:
        raise InvalidRequest(
            f"artifact {facts.digest} is in the catalog with other facts: {known.facts}", field="artifact"
        )
    size = store.size(facts.digest)
    if size is None:
        raise ArtifactUnavailable(f"artifact {facts.digest} is not in the store: upload it first", field="digest")
    if size != facts.size:
        raise ArtifactUnavailable(
            f"artifact {facts.digest} has {size} bytes in the store, not {facts.size}", field="size"
        )


def _move_channel(command: MoveChannel, view: Snapshot) -> Decision:
    known = _policy(command.policy, view, command.expected_version)
    inputs.check_channel(command.channel)
    inputs.check_split(command.target)
    for split in command.target:
        _must_have(known, split.revision, "target")
    return _move(known, command.channel, command.target, view)


def _rollback(command: Rollback, view: Snapshot) -> Decision:
    known = _policy(command.policy, view, command.expected_version)
    inputs.check_channel(command.channel)
    if command.channel not in known.channels:
        raise _no_channel(known, command.channel)
    if command.to:
        _must_have(known, command.to, "to")
        return _move(known, command.channel, (Split(command.to),), view)
    target = known.channels[command.channel]
    if len(target) > 1:
        revisions = " and ".join(str(split.revision) for split in target)
        raise InvalidRequest(
            f"{known.policy}:{command.channel} is split between {revisions}: say which revision to roll back to",
            field="to",
        )
    current = target[0].revision if target else known.latest
    if current <= 1:
        raise NotFound(f"{known.policy}:{command.channel} has no revision before {current} to roll back to", field="to")
    return _move(known, command.channel, (Split(current - 1),), view)


def _move(known: PolicyRecord, channel: str, target: tuple[Split, ...], view: Snapshot) -> Decision:
    """Point the channel at ``target``, and say what it then names, unless that is a split."""
    if channel not in known.channels and len(known.channels) >= inputs.MAX_CHANNELS:
        raise InvalidRequest(f"{known.policy} has {inputs.MAX_CHANNELS} channels already", field="channel")
    numbers = [split.revision for split in target] or [known.latest]
    revision = numbers[0] if len(numbers) == 1 else 0
    digest = _digest(known.policy, revision, view) if revision else ""
    moved = known.channels.get(channel) != target
    events = (ChannelMoved(known.policy, channel, target),) if moved else ()
    return Decision(events, known.policy, revision, digest)


def _remove_channel(command: RemoveChannel, view: Snapshot) -> Decision:
    known = _policy(command.policy, view, command.expected_version)
    inputs.check_channel(command.channel)
    if command.channel == STABLE:
        raise InvalidRequest("stable can't be removed: move it to no target, and it follows latest", field="channel")
    if command.channel not in known.channels:
        raise _no_channel(known, command.channel)
    return Decision((ChannelRemoved(known.policy, command.channel),), known.policy)


def _retire(command: RetirePolicy, view: Snapshot) -> Decision:
    check_policy(command.policy)
    known = view.policy(command.policy)
    if known is None:
        raise _no_policy(command.policy)
    _expect_version(command.policy, known, command.expected_version)
    events = () if known.retired else (PolicyRetired(known.policy),)
    return Decision(events, known.policy, known.latest)


def _create_key(command: CreateKey, view: Snapshot) -> Decision:
    inputs.check_new_key(command)
    known = view.key_by_id(command.key_id) or view.key(command.key_hash)
    if known is None:
        return Decision((KeyCreated(command.key_id, command.key_hash, command.tenant, command.scopes, command.label),))
    asked = (command.key_id, command.key_hash, command.tenant, command.scopes, command.label, False)
    if asked != (known.key_id, known.key_hash, known.tenant, known.scopes, known.label, known.revoked):
        raise VersionConflict(f"key {known.key_id} exists already: make a new secret", field="key_id")
    return Decision()


def _revoke_key(command: RevokeKey, view: Snapshot) -> Decision:
    known = view.key_by_id(command.key_id)
    if known is None:
        raise NotFound("there is no key with that id", field="key_id")
    return Decision() if known.revoked else Decision((KeyRevoked(command.key_id),))


def _policy(name: str, view: Snapshot, expected_version: int | None) -> PolicyRecord:
    """The live policy at the version that the command was made for."""
    check_policy(name)
    known = view.policy(name)
    if known is None:
        raise _no_policy(name)
    _must_live(known)
    _expect_version(name, known, expected_version)
    return known


def _expect_version(name: str, known: PolicyRecord | None, expected: int | None) -> None:
    """A policy that does not exist has version 0."""
    version = known.version if known else 0
    if expected is not None and expected != version:
        raise VersionConflict(f"{name} is at version {version}, not {expected}", field="expected_version")


def _must_live(known: PolicyRecord) -> None:
    if known.retired:
        raise Retired(f"policy {known.policy} is retired", field="policy")


def _must_be_over(known: PolicyRecord, base: str, field: str) -> None:
    if known.base != base:
        raise VersionConflict(f"policy {known.policy} is over base {known.base}, not {base}", field=field)


def _must_have(known: PolicyRecord, revision: int, field: str) -> None:
    # revisions are numbered from 1 without gaps
    if not 1 <= revision <= known.latest:
        raise NotFound(f"{known.policy} has no revision {revision}", field=field)


def _known_base(name: str, view: Snapshot, field: str) -> None:
    if view.base(name) is None:
        raise NotFound(f"there is no base {name}: add it first", field=field)


def _digest(policy: str, revision: int, view: Snapshot) -> str:
    record = view.revision(policy, revision)
    return record.artifact.digest if record else ""


def _no_policy(name: str) -> NotFound:
    return NotFound(f"there is no policy {name}", field="policy")


def _no_channel(known: PolicyRecord, channel: str) -> NotFound:
    return NotFound(f"{known.policy} has no channel {channel}", field="channel")
