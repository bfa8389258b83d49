"""What happens to a node: everything that the state machine can be told. Times are the caller's monotonic seconds."""

from __future__ import annotations

import msgspec

from backends.interface import EngineLimits, Health, Removal
from wire.node import Acquire, Holding
from wire.outcomes import Outcome
from wire.transfer import Offered


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events."""


class Asked(Event, frozen=True, kw_only=True):
    """A gateway asks for a lease. ``ask`` is the caller's handle: exactly one Answer effect will carry it."""

    ask: int
    request: Acquire
    deadline: float


class Released(Event, frozen=True, kw_only=True):
    """A gateway gives leases back, granted or still waited for."""

    gateway: str
    instance: str
    leases: tuple[int, ...]


class GatewayHeard(Event, frozen=True, kw_only=True):
    """A sign of life. Another ``instance`` than before means that the gateway restarted."""

    gateway: str
    instance: str


class GatewayHolds(Event, frozen=True, kw_only=True):
    """A gateway tells all that it holds and waits for here: see ``wire.node.Holding``."""

    holding: Holding


class Cordoned(Event, frozen=True, kw_only=True):
    """An operator takes the node out of service, or (``on`` is false) back in."""

    on: bool


class RevisionOffered(Event, frozen=True, kw_only=True):
    """``digest``, of ``size`` bytes, is what ``policy`` may be asked for with from now on."""

    policy: str
    digest: str
    size: int


class TransferOffered(Event, frozen=True, kw_only=True):
    """``trainer``, by its endpoint, writes a revision that may be pulled from it already."""

    trainer: str
    offer: Offered


class TransferBound(Event, frozen=True, kw_only=True):
    """The file of ``transfer`` is whole, and ``digest`` its digest."""

    transfer: str
    digest: str


class TransferWithdrawn(Event, frozen=True, kw_only=True):
    """There will be no revision of ``transfer``."""

    transfer: str


class PullDone(Event, frozen=True, kw_only=True):
    """The extent of ``generation`` holds all bytes of ``transfer``, which were verified to be of ``digest``."""

    transfer: str
    generation: int
    digest: str


class PullFailed(Event, frozen=True, kw_only=True):
    """A pull ended, told to or not: nobody writes to its extent any more, and its bytes are worth nothing."""

    transfer: str
    generation: int
    message: str


class FetchDone(Event, frozen=True, kw_only=True):
    """The extent of ``generation`` holds the verified bytes of ``digest``, which came from ``source`` (as in reports);
    from ``peer``, where that is another node."""

    digest: str
    generation: int
    source: str = "store"
    peer: str = ""


class FetchOverdue(Event, frozen=True, kw_only=True):
    """A fetch takes too long and was given up, but still holds its extent: FetchFailed or FetchDone is yet to come."""

    digest: str
    generation: int
    message: str


class FetchFailed(Event, frozen=True, kw_only=True):
    """Nobody writes to the extent any more, and its bytes are worth nothing."""

    digest: str
    generation: int
    outcome: Outcome
    message: str


class FetchCancelled(Event, frozen=True, kw_only=True):
    """A fetch ended because it was cancelled: nobody writes to the extent any more, and its bytes are worth nothing."""

    digest: str
    generation: int


class PeerFailed(Event, frozen=True, kw_only=True):
    """``node`` gave other bytes than those asked of it (``wrong``), or did not answer, or not in time."""

    node: str
    wrong: bool
    message: str


class GiveBegun(Event, frozen=True, kw_only=True):
    """Another node takes the bytes of ``digest``, which lie in the arena. ``give`` is the transfer's number."""

    give: int
    digest: str


class GiveEnded(Event, frozen=True, kw_only=True):
    """Nobody reads for transfer ``give`` any more, which gave so many bytes."""

    give: int
    digest: str
    given_bytes: int


class EngineUp(Event, frozen=True, kw_only=True):
    """An engine answers, started or adopted. ``installed`` was read from it, not remembered; ``token`` lets us in.

    ``at`` is Unix time in seconds, for people; ``pid`` its process, or 0.
    """

    engine: str
    limits: EngineLimits
    installed: frozenset[str]
    host: str
    port: int
    token: str = ""
    pid: int = 0
    at: float = 0.0


class EngineDown(Event, frozen=True, kw_only=True):
    """An engine answers no more: its slots are empty and its leases void. ``health`` is DEAD or STARTING.

    ``at`` is Unix time in seconds, for people.
    """

    engine: str
    health: Health
    detail: str
    at: float = 0.0


class EngineRemarked(Event, frozen=True, kw_only=True):
    """What is to be said of an engine that is ready: that it is too busy to answer, say. Empty: nothing any more."""

    engine: str
    detail: str


class OperationEnded(Event, frozen=True, kw_only=True):
    """Base of the ends of engine calls. ``op`` is the number that the effect carried."""

    engine: str
    op: int


class InstallDone(OperationEnded, frozen=True, kw_only=True):
    pass


class InstallRejected(OperationEnded, frozen=True, kw_only=True):
    """The engine can't run this adapter; trying again will not help."""

    message: str


class InstallBroke(OperationEnded, frozen=True, kw_only=True):
    """The install did not happen; trying again may help."""

    message: str


class InstallUnsure(OperationEnded, frozen=True, kw_only=True):
    """The engine did not answer: the install may have happened, or may still happen."""

    message: str


class RemoveDone(OperationEnded, frozen=True, kw_only=True):
    removal: Removal


class RemoveUnsure(OperationEnded, frozen=True, kw_only=True):
    """The engine did not answer: the removal may have happened, or may still happen."""

    message: str


class InstalledRead(OperationEnded, frozen=True, kw_only=True):
    """What the engine says it has; None where it did not answer."""

    names: frozenset[str] | None


class Tick(Event, frozen=True, kw_only=True):
    """Time passed. Due several times a second: deadlines, expiries and retries happen on ticks."""


AnyEvent = (
    Asked
    | Released
    | GatewayHeard
    | GatewayHolds
    | Cordoned
    | RevisionOffered
    | TransferOffered
    | TransferBound
    | TransferWithdrawn
    | PullDone
    | PullFailed
    | FetchDone
    | FetchOverdue
    | FetchFailed
    | FetchCancelled
    | PeerFailed
    | GiveBegun
    | GiveEnded
    | EngineUp
    | EngineDown
    | EngineRemarked
    | InstallDone
    | InstallRejected
    | InstallBroke
    | InstallUnsure
    | RemoveDone
    | RemoveUnsure
    | InstalledRead
    | Tick
)
