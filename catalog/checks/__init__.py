"""Deciding on a command: the events that it becomes, or nothing to do, or a refusal. Reads the view, writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wire.registrar import (
    AddBase,
    ChangeLabels,
    ClaimPolicy,
    CondemnArtifacts,
    CreateKey,
    CreatePolicy,
    DropForward,
    ImportRevisions,
    MoveChannel,
    Promote,
    PruneNext,
    PruneRevisions,
    PublishRevision,
    ReleaseRecord,
    RemoveArtifacts,
    RemoveChannel,
    RenamePolicy,
    RestorePolicy,
    RestoreRevision,
    RetainRecord,
    RetirePolicy,
    RetireRevision,
    RevokeKey,
    Rollback,
    SetRetention,
)

from .. import inputs
from ..snapshot import Snapshot
from . import artifacts, bases, channels, importing, keys, policies, retention, revisions, training
from .decision import ArtifactSizes, Context, Decision

__all__ = ["ArtifactSizes", "Decision", "WriteCommand", "decide"]

WriteCommand = (
    AddBase
    | CreatePolicy
    | ClaimPolicy
    | PublishRevision
    | MoveChannel
    | Promote
    | Rollback
    | RemoveChannel
    | RetirePolicy
    | RestorePolicy
    | RenamePolicy
    | DropForward
    | ChangeLabels
    | SetRetention
    | PruneRevisions
    | PruneNext
    | RetireRevision
    | RestoreRevision
    | RetainRecord
    | ReleaseRecord
    | CondemnArtifacts
    | RemoveArtifacts
    | ImportRevisions
    | CreateKey
    | RevokeKey
)

_DECIDERS: dict[type[WriteCommand], Callable[[Any, Context], Decision]] = {
    AddBase: bases.add,
    CreatePolicy: policies.create,
    ClaimPolicy: policies.claim,
    PublishRevision: revisions.publish,
    MoveChannel: channels.move,
    Promote: channels.promote,
    Rollback: channels.roll_back,
    RemoveChannel: channels.remove,
    RetirePolicy: policies.retire,
    RestorePolicy: policies.restore,
    RenamePolicy: policies.rename,
    DropForward: policies.drop_forward,
    ChangeLabels: policies.change_labels,
    SetRetention: retention.set_retention,
    PruneRevisions: retention.prune,
    PruneNext: retention.prune_next,
    RetireRevision: revisions.retire,
    RestoreRevision: revisions.restore,
    RetainRecord: training.retain,
    ReleaseRecord: training.release,
    CondemnArtifacts: artifacts.condemn,
    RemoveArtifacts: artifacts.remove,
    ImportRevisions: importing.import_revisions,
    CreateKey: keys.create,
    RevokeKey: keys.revoke,
}


def decide(command: WriteCommand, view: Snapshot, store: ArtifactSizes, now_ms: int) -> Decision:
    """Raises a RoostError where the command is refused. ``now_ms`` is Unix time in milliseconds."""
    inputs.check_actor(command.actor)
    return _DECIDERS[type(command)](command, Context(view, store, now_ms))
