"""The engines of a node and what is in their slots, as the sidecar knows them."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable

import msgspec

from backends.interface import EngineLimits, EngineSettings, Health
from catalog.names import split_adapter_name

from .rates import Smoothed

LoadKey = tuple[str, str]

# a slot whose engine said "busy", or whose lease was lost on an engine that can't say so, is left alone this long
HOLD_S = 2.0


class SlotState(enum.StrEnum):
    """SERVING takes leases. DRAINING takes no new ones. REMOVING is on its way out, INSTALLING on its way in."""

    INSTALLING = "installing"
    SERVING = "serving"
    DRAINING = "draining"
    REMOVING = "removing"


class Slot(msgspec.Struct):
    """One adapter in one engine. ``unsure``: the engine has not confirmed the last call about it.

    It is no victim before ``hold_until``, and only of the load (base, adapter) ``claimed_by`` if there is one. It
    serves since ``since``. ``size`` is its revision's, in bytes; 0 where the adapter was there before us. ``lease_s``
    is how long its leases lasted lately; None before one has ended.
    """

    adapter: str
    digest: str
    rank: int
    state: SlotState
    leases: int = 0
    used_at: float = 0.0
    hold_until: float = 0.0
    unsure: bool = False
    since: float = -math.inf
    size: int = 0
    claimed_by: LoadKey | None = None
    lease_s: Smoothed | None = None

    def evictable(self, now: float, load: LoadKey | None) -> bool:
        """Whether ``load`` may take the slot; None is one that claims nothing."""
        return (
            self.leases == 0
            and (self.state is SlotState.SERVING or self.state is SlotState.DRAINING)
            and self.hold_until <= now
            and (self.claimed_by is None or self.claimed_by == load)
        )


class CallKind(enum.StrEnum):
    INSTALL = "install"
    REMOVE = "remove"
    READ = "read"


class Call(msgspec.Struct, frozen=True):
    """One call to an engine, queued or under way."""

    op: int
    kind: CallKind
    adapter: str = ""
    digest: str = ""


class Engine:
    """One engine: its health and limits, its slots by adapter name, and the calls that it gets."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.name = settings.name
        self.base = settings.base
        self.health = Health.STARTING
        self.detail = ""
        # for people: its process, when its health last changed (Unix seconds), how many lives it had before this one
        self.pid = 0
        self.since = 0.0
        self.restarts = 0
        self.limits: EngineLimits | None = None
        self.host = ""
        self.port = 0
        # what requests to it carry as bearer token: never told to anybody but gateways, with a lease
        self.token = ""
        self.outstanding = 0
        self.slots: dict[str, Slot] = {}
        # adapters in the engine that are not named the way we name them: not ours to touch
        self.foreign = 0
        # under way, by number, the oldest first
        self.calls: dict[int, Call] = {}
        self.call_ended_at = 0.0
        self.queued: deque[Call] = deque()
        # adapters to bring back after a restart, the most recently used first
        self.lost: list[Slot] = []
        # when to compare what we know with what it has
        self.read_at = 0.0

    @property
    def ready(self) -> bool:
        return self.limits is not None

    def ready_with(self, limits: EngineLimits, host: str, port: int, token: str) -> None:
        self.health = Health.READY
        self.detail = ""
        self.limits = limits
        self.host = host
        self.port = port
        self.token = token

    def count_foreign(self, names: Iterable[str]) -> bool:
        """Count strangers' adapters among ``names``, all that it has. Returns whether their number changed."""
        before, self.foreign = self.foreign, sum(split_adapter_name(name) is None for name in names)
        return self.foreign != before

    def down(self, health: Health, detail: str) -> None:
        """Nothing is in it any more; what served is remembered for its return."""
        self.restarts += health is Health.STARTING
        self.health = health
        self.detail = detail
        self.pid = 0
        self.limits = None
        if self.slots:
            served = [slot for slot in self.slots.values() if slot.state is SlotState.SERVING]
            self.lost = sorted(served, key=lambda slot: -slot.used_at)
        self.slots = {}
        self.foreign = 0

    @property
    def trouble(self) -> str:
        """Why it is not ready, for clients: ``detail`` names addresses and ends of logs, which are the operator's."""
        return "it failed and is started again" if self.detail else "it starts"

    @property
    def free_slots(self) -> int:
        return max(0, self.limits.slots - self.foreign - len(self.slots)) if self.limits else 0

    @property
    def takes_call(self) -> bool:
        """Whether the call that waits longest may be sent. What an engine has is read while nothing else changes it."""
        if not self.queued or not self.calls:
            return bool(self.queued)
        kinds = {self.queued[0].kind, *(call.kind for call in self.calls.values())}
        return CallKind.READ not in kinds and len(self.calls) < self.calls_at_once

    @property
    def calls_at_once(self) -> int:
        return self.limits.calls_at_once if self.limits else 1

    @property
    def loadable(self) -> bool:
        """Whether installs make sense now: an engine that left a call unanswered gets no new ones."""
        return self.ready and not any(slot.unsure for slot in self.slots.values())

    def answers(self, adapter: str) -> bool:
        """Whether a lease for ``adapter`` ("": the base) may be given here now."""
        if not adapter:
            return self.limits is not None and self.limits.serves_base
        return self.ready and self.serving(adapter) is not None

    def misfit(self, rank: int) -> str | None:
        """Why this engine can't run an adapter of ``rank``; None where it can. The engine must be ready."""
        limits = self.limits
        if limits is not None and rank > limits.max_rank:
            return f"rank {rank} is above the maximum of engine {self.name}, {limits.max_rank}"
        return None

    def leasable(self, adapter: str) -> bool:
        """Whether a lease for ``adapter`` may stand: it may also be one that takes no new ones."""
        slot = self.slots.get(adapter)
        return slot is not None and (slot.state is SlotState.SERVING or slot.state is SlotState.DRAINING)

    def serving(self, adapter: str) -> Slot | None:
        slot = self.slots.get(adapter)
        return slot if slot is not None and slot.state is SlotState.SERVING else None


def least_loaded(engines: list[Engine], adapter: str) -> Engine | None:
    """The ready engine with the fewest outstanding leases among those that serve ``adapter`` ("": the base)."""
    best: Engine | None = None
    for engine in engines:
        if engine.answers(adapter) and (best is None or engine.outstanding < best.outstanding):
            best = engine
    return best
