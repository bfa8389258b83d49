"""Cold loads and who waits for them: how many may run, in which order they start, what they take."""

from __future__ import annotations

import enum
from bisect import insort
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator

import msgspec

from wire.node import Acquire

from .leases import LeaseKey
from .limit import AdaptiveLimit
from .promises import Promise
from .rates import DrainRate, LoadTimes
from .settings import SidecarSettings
from .slots import LoadKey, Slot
from .turns import Charge, Turns

# what a load is believed to take before one was measured
_FIRST_GUESS_S = 0.5
_FIRST_GUESS_BYTES_S = 1e9
_SHORTEST_S = 1e-6
# how many loads run at once before anything was measured
_FIRST_LIMIT = 2


class Stage(enum.StrEnum):
    """WAITING loads hold nothing. The others are in flight: bytes coming, a slot being cleared, an install."""

    WAITING = "waiting"
    FETCHING = "fetching"
    CLEARING = "clearing"
    INSTALLING = "installing"


class Waiter(msgspec.Struct):
    """One lease being waited for; asked more than once it has several ``asks``, and each is answered."""

    request: Acquire
    asks: list[int]


class Load:
    """Making one adapter serve on one base: a fetch where its bytes are not resident, and an install.

    A ``background`` load has no waiters and takes no slot from anybody but what it ``replaces``: it brings back what a
    restart lost, or brings in what will be asked for.
    """

    __slots__ = (
        "adapter", "at_once", "background", "base", "blocked_since", "charge", "digest", "drained", "drained_at",
        "drains", "engine", "fetched", "handed", "not_by", "order", "promise", "rank", "replaces", "sent", "size",
        "stage", "started", "tenant", "victim", "waiters",
    )  # fmt: skip

    def __init__(
        self, base: str, adapter: str, digest: str, size: int, rank: int, order: int, background: bool = False
    ) -> None:
        self.base = base
        self.adapter = adapter
        self.tenant = adapter.partition("@")[0]
        self.digest = digest
        self.size = size
        self.rank = rank
        self.order = order
        self.background = background
        # adapters whose idle slots it may take though nobody waits for it
        self.replaces: frozenset[str] = frozenset()
        self.stage = Stage.WAITING
        self.waiters: dict[LeaseKey, Waiter] = {}
        # how many of them can't ask engines of a backend
        self.not_by: Counter[str] = Counter()
        self.engine = ""
        self.victim = ""
        self.started = 0.0
        # when its install was asked for
        self.sent = 0.0
        # how many were in flight when it started, itself included, and whether its bytes had to be fetched
        self.at_once = 0
        self.fetched = False
        # whether it waits for an engine that takes loads at its own pace, and holds no permit
        self.handed = False
        # what was told to who came back for it, until its turn comes
        self.promise: Promise | None = None
        # what its tenant was charged for its turn
        self.charge: Charge | None = None
        # since when it is known that a slot or the arena's room, not its turn, keeps it from serving
        self.blocked_since: float | None = None
        # the slot that takes no new leases because this load has waited too long
        self.drained: tuple[str, Slot] | None = None
        self.drained_at = 0.0
        # how often that was which slot, by engine and adapter
        self.drains: Counter[tuple[str, str]] = Counter()

    @property
    def key(self) -> LoadKey:
        return self.base, self.adapter

    def is_for(self, backend: str) -> bool:
        """Whether an engine of ``backend`` would do for anybody who waits."""
        return not self.not_by[backend] or self.not_by[backend] < len(self.waiters)

    def __lt__(self, other: Load) -> bool:
        return self.order < other.order


class LoadQueue:
    """All loads of the node. Waiting ones start when it is their tenant's turn, background ones last."""

    def __init__(self, settings: SidecarSettings) -> None:
        self._limit = AdaptiveLimit(settings.loads_in_flight_min, settings.loads_in_flight, _FIRST_LIMIT)
        self._engines = max(1, len(settings.engines))
        self._loads: dict[LoadKey, Load] = {}
        self._flying: dict[LoadKey, Load] = {}
        self._background: list[Load] = []
        self._handed = 0
        # how many may be with engines that take loads at their own pace before no other starts
        self.hands = 0
        self._order = 0
        self.turns: Turns[Load] = Turns()
        self.times = LoadTimes(_FIRST_GUESS_S, _FIRST_GUESS_BYTES_S)
        # of all that leave the queue, and of those that leave it to start
        self._drain = DrainRate()
        self._starts = DrainRate()

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads.values())

    def get(self, key: LoadKey) -> Load | None:
        return self._loads.get(key)

    def order(self) -> Iterator[Load]:
        """The waiting loads, each when it is its turn: see ``Turns.order``."""
        yield from self.turns.order()
        yield from tuple(self._background)

    def still(self, loads: Iterable[Load]) -> Iterator[Load]:
        """Those of ``loads`` that have not ended when they are reached: ending one may end others."""
        return (load for load in tuple(loads) if self._loads.get(load.key) is load)

    def flying(self) -> Iterator[Load]:
        """The loads in flight."""
        return iter(self._flying.values())

    @property
    def limit(self) -> int:
        """How many may be in flight now, beside those that wait for an engine's pace."""
        return self._limit.value

    @property
    def queued(self) -> int:
        """How many loads that somebody waits for have not started."""
        return len(self.turns)

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    @property
    def may_start(self) -> bool:
        """Whether anything waits, and there is a permit for it."""
        return (bool(self.turns) or bool(self._background)) and self.has_permit

    @property
    def has_permit(self) -> bool:
        return self.in_flight - self._handed < self.limit and self._handed < max(1, self.hands)

    def next_order(self) -> int:
        """The age of what comes now."""
        self._order += 1
        return self._order

    def add(
        self, base: str, adapter: str, digest: str, size: int, rank: int, now: float, *,
        background: bool = False, promise: Promise | None = None,
    ) -> Load:  # fmt: skip
        """A new load, waiting, as old as what was promised to who asks. The caller has checked that it is new."""
        order = promise.order if promise else self.next_order()
        load = Load(base, adapter, digest, size, rank, order, background)
        load.promise = promise
        self._loads[load.key] = load
        self._wait(load, now)
        return load

    def start(self, load: Load, now: float, *, resident: bool) -> None:
        """Take a waiting load into flight, at its tenant's expense; the caller sets its stage."""
        load.started = now
        load.fetched = not resident
        load.at_once = self.in_flight - self._handed + 1
        self._wait_no_more(load)
        self._flying[load.key] = load
        if not load.background:
            load.charge = self.turns.charge(load.tenant, self.times.cost(load.size, resident=resident))
            for rate in (self._drain, self._starts):
                rate.left(now, waiting=self.queued, at_once=self._at_once)

    def hand_over(self, load: Load, now: float) -> None:
        """``load``, whose bytes are there, waits for its engine's pace from now on, which nothing here changes."""
        if load.handed:
            return
        load.handed = True
        self._handed += 1
        if load.fetched:
            self._limit.ended(self._kind(load), now - load.started, max(load.at_once, self.in_flight - self._handed))

    def requeue(self, load: Load, now: float) -> None:
        """Back to waiting, at the place that its age gives it, and for nothing."""
        self._take_back(load)
        load.stage = Stage.WAITING
        load.engine = load.victim = ""
        del self._flying[load.key]
        self._wait(load, now)
        if load.charge is not None:
            self.turns.give_back(load.charge)
            load.charge = None

    def promote(self, load: Load, now: float) -> None:
        """Somebody waits for a background load now: it starts like any other."""
        if load.stage is Stage.WAITING:
            self._wait_no_more(load)
            load.background = False
            self._wait(load, now)
        load.background = False

    def remove(self, load: Load, now: float, *, refused: bool = False) -> None:
        """It ended; ``refused`` where it was never let in."""
        del self._loads[load.key]
        self._take_back(load)
        if self._flying.pop(load.key, None) is None:
            self._wait_no_more(load)
            if load.background:
                return
            self._starts.given_up(now, waiting=self.queued)
            if not refused:
                self._drain.left(now, waiting=self.queued, at_once=self._at_once)

    def served(self, load: Load, now: float) -> None:
        """``load``, in flight still, has become an adapter that serves."""
        seconds = now - load.started
        self.times.loaded(seconds)
        if not load.handed:
            self._limit.ended(self._kind(load), seconds, max(load.at_once, self.in_flight))

    def drains_in_s(self, departures: float, now: float) -> float:
        """Seconds until that many of the waiting loads will have started, or been given up."""
        return self._drain.until(departures, now, self._expected_interval_s)

    @property
    def start_rate(self) -> float:
        """Waiting loads that start in a second while there are any."""
        return 1.0 / max(self._starts.interval_s(self._expected_interval_s), _SHORTEST_S)

    def starts_within(self, seconds: float, now: float) -> float:
        """How many waiting loads will start in that time, if there are as many."""
        return seconds / max(self._starts.pending_interval_s(now, self._expected_interval_s), _SHORTEST_S)

    @property
    def _expected_interval_s(self) -> float:
        # however many are in flight, an engine installs one at a time
        return max(self.times.load_s / self._at_once, self.times.install_s / self._engines)

    @property
    def _at_once(self) -> int:
        return max(self.limit, self.hands)

    def timed_out(self) -> None:
        """A load in flight was given up because something took too long."""
        self._limit.timed_out()

    def _take_back(self, load: Load) -> None:
        self._handed -= load.handed
        load.handed = False

    @staticmethod
    def _kind(load: Load) -> Hashable:
        return load.base, load.size.bit_length(), load.fetched

    def _wait(self, load: Load, now: float) -> None:
        if load.background:
            insort(self._background, load)
        else:
            self.turns.add(load.tenant, load, self.times.cost(load.size, resident=False))
            self._drain.joined(now)
            self._starts.joined(now)

    def _wait_no_more(self, load: Load) -> None:
        if load.background:
            self._background.remove(load)
        else:
            self.turns.remove(load.tenant, load)
