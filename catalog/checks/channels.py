"""Decisions on channels: where they point, how a split deals, and what a rollback returns to.

A channel keeps what it served before, the newest few targets. A move, a promotion, and for a channel that follows
``latest`` and has such targets already also a publish, add what they replace: a target, or the revision that was the
latest. A rollback takes from there, adds nothing, and so goes further back each time. Where nothing is left, as for a
channel that only ever followed ``latest``, it goes to the next lower revision that is not retired.
"""

from __future__ import annotations

from wire.events import ChannelMoved, ChannelRemoved, Split
from wire.outcomes import InvalidRequest, NotFound
from wire.registrar import MoveChannel, Promote, RemoveChannel, Rollback

from .. import inputs
from ..names import LATEST, STABLE
from ..records import PolicyRecord
from ..snapshot import Snapshot
from .common import known_revision, live_policy, live_revision
from .decision import Context, Decision


def move(command: MoveChannel, context: Context) -> Decision:
    view = context.view
    known = live_policy(command.policy, view, command.expected_version)
    inputs.check_channel(command.channel)
    inputs.check_split(command.target, command.seed)
    for split in command.target:
        live_revision(known, split.revision, view, "target")
    return _point(known, command.channel, command.target, view, command.seed)


def promote(command: Promote, context: Context) -> Decision:
    view = context.view
    known = live_policy(command.policy, view, command.expected_version)
    inputs.check_channel(command.channel)
    if bool(command.source) == bool(command.revision):
        raise InvalidRequest("name what to promote: either a channel or a revision", field="source")
    number = command.revision or _only_revision(known, command.source, "source", "promote")
    live_revision(known, number, view, "revision" if command.revision else "source")
    return _point(known, command.channel, (Split(number),), view)


def roll_back(command: Rollback, context: Context) -> Decision:
    view = context.view
    known = live_policy(command.policy, view, command.expected_version)
    inputs.check_channel(command.channel)
    if command.channel not in known.channels:
        raise _no_channel(known, command.channel, "channel")
    former = known.before.get(command.channel, ())
    current = _served(known, command.channel)
    if command.to:
        live_revision(known, command.to, view, "to")
        target: tuple[Split, ...] = (Split(command.to),)
        if target == current:
            return _point(known, command.channel, target, view, undone=0)
        # those after it are what is rolled back, too
        undone = next((count for count, served in enumerate(reversed(former), 1) if served == target), 0)
        return _point(known, command.channel, target, view, undone=undone)
    for undone, target in enumerate(reversed(former), 1):
        if target != current and not _any_retired(known, target, view):
            return _point(known, command.channel, target, view, undone=undone)
    newest = _only_revision(known, command.channel, "to", "roll back to") if known.latest else 0
    number = newest - 1
    while number > 0 and known_revision(known, number, view, "to").retired_ms:
        number -= 1
    if number < 1:
        raise NotFound(
            f"{known.policy}:{command.channel} has had nothing before, and there is no revision before {newest} to"
            " roll back to",
            field="to",
        )
    return _point(known, command.channel, (Split(number),), view, undone=len(former))


def remove(command: RemoveChannel, context: Context) -> Decision:
    known = live_policy(command.policy, context.view, command.expected_version)
    inputs.check_channel(command.channel)
    if command.channel == STABLE:
        raise InvalidRequest("stable is what a bare name means: it can be moved, not removed", field="channel")
    if command.channel not in known.channels:
        raise _no_channel(known, command.channel, "channel")
    return Decision((ChannelRemoved(known.policy, command.channel),), known.policy)


def _point(
    known: PolicyRecord,
    channel: str,
    target: tuple[Split, ...],
    view: Snapshot,
    seed: int | None = None,
    *,
    undone: int | None = None,
) -> Decision:
    """Point the channel at ``target``, and say what it then names, unless that is a split.

    ``undone`` is for rollbacks alone: how many former targets it uses up.
    """
    if channel not in known.channels and len(known.channels) >= inputs.MAX_CHANNELS:
        raise InvalidRequest(f"{known.policy} has {inputs.MAX_CHANNELS} channels already", field="channel")
    former_seed = known.seeds.get(channel, 0)
    # kept while the channel is no split, for when it is one again
    new_seed = former_seed if seed is None else seed
    numbers = [split.revision for split in target] or [known.latest]
    revision = numbers[0] if len(numbers) == 1 else 0
    found = view.revision(known.policy, revision) if revision else None
    events: tuple[ChannelMoved, ...] = ()
    if (known.channels.get(channel), former_seed) != (target, new_seed):
        served = _served(known, channel)
        replaced = served if undone is None and served != _as_served(known, target) else ()
        events = (ChannelMoved(known.policy, channel, target, new_seed, replaced, undone or 0),)
    return Decision(events, known.policy, revision, found.artifact.digest if found else "")


def _served(known: PolicyRecord, channel: str) -> tuple[Split, ...]:
    """What requests for the channel get now; nothing where there is no such channel, or no revision."""
    target = known.channels.get(channel)
    return () if target is None else _as_served(known, target)


def _as_served(known: PolicyRecord, target: tuple[Split, ...]) -> tuple[Split, ...]:
    """A split as it is; of anything else the revision, without a weight that means nothing."""
    if len(target) > 1:
        return target
    number = target[0].revision if target else known.latest
    return (Split(number),) if number else ()


def _any_retired(known: PolicyRecord, target: tuple[Split, ...], view: Snapshot) -> bool:
    return any(known_revision(known, split.revision, view, "to").retired_ms for split in target)


def _only_revision(known: PolicyRecord, channel: str, field: str, doing: str) -> int:
    """The revision that ``channel`` has now. Raises NotFound, and InvalidRequest for a split."""
    target = () if channel == LATEST else known.channels.get(channel)
    if target is None:
        raise _no_channel(known, channel, field)
    if len(target) > 1:
        revisions = " and ".join(str(split.revision) for split in target)
        raise InvalidRequest(
            f"{known.policy}:{channel} is split between {revisions}: say which revision to {doing}", field=field
        )
    number = target[0].revision if target else known.latest
    if not number:
        raise NotFound(f"{known.policy} has no revision yet", field=field)
    return number


def _no_channel(known: PolicyRecord, channel: str, field: str) -> NotFound:
    return NotFound(f"{known.policy} has no channel {channel}", field=field)
