"""What the state machine wants done. Whoever performs an effect reports its end as an event."""

from __future__ import annotations

import msgspec

from wire.node import Granted, Refused
from wire.peers import Peer

from .extents import Extent


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all effects."""


class Answer(Effect, frozen=True, kw_only=True):
    """The one answer to the Asked event that carried ``ask``."""

    ask: int
    answer: Granted | Refused


class StartFetch(Effect, frozen=True, kw_only=True):
    """Bring the bytes of ``digest`` into ``extent`` and verify them: from one of ``peers``, other nodes, if one has
    them. Ends as FetchDone, FetchFailed or FetchCancelled."""

    digest: str
    extent: Extent
    peers: tuple[Peer, ...] = ()


class CancelFetch(Effect, frozen=True, kw_only=True):
    """Nobody needs the fetch of ``digest`` into the extent of ``generation`` now. Ends as FetchCancelled, or as any."""

    digest: str
    generation: int


class StartPull(Effect, frozen=True, kw_only=True):
    """Bring the bytes of ``transfer`` from ``trainer`` into ``extent``, verify and seal them. Ends as PullDone or
    PullFailed."""

    trainer: str
    transfer: str
    extent: Extent


class CancelPull(Effect, frozen=True, kw_only=True):
    """Nobody needs the pull of ``transfer`` now. It ends all the same, either way."""

    transfer: str


class ClearExtent(Effect, frozen=True, kw_only=True):
    """``extent`` was evicted: mark it invalid in the segment before anything else is written there."""

    digest: str
    extent: Extent


class EngineCall(Effect, frozen=True, kw_only=True):
    """Base of engine calls. Ends as an OperationEnded with the same ``op``."""

    engine: str
    op: int


class StartInstall(EngineCall, frozen=True, kw_only=True):
    """Ends as InstallDone, InstallRejected, InstallBroke or InstallUnsure."""

    adapter: str
    digest: str
    rank: int
    extent: Extent


class StartRemove(EngineCall, frozen=True, kw_only=True):
    """Ends as RemoveDone or RemoveUnsure."""

    adapter: str


class ReadInstalled(EngineCall, frozen=True, kw_only=True):
    """Ends as InstalledRead."""


AnyEffect = (
    Answer
    | StartFetch
    | CancelFetch
    | StartPull
    | CancelPull
    | ClearExtent
    | StartInstall
    | StartRemove
    | ReadInstalled
)
