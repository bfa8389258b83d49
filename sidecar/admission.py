"""Cold loads and who waits for them: how many may run, how many may wait, in which order they start."""

from __future__ import annotations

import enum
from bisect import insort
from collections.abc import Iterator

import msgspec

from wire.node import Acquire

from .leases import LeaseKey
from .slots import Slot

LoadKey = tuple[str, str]

# what a load is believed to take before one was measured
_FIRST_GUESS_S = 1.0
# weight of a new measurement in the moving average
_SMOOTHING = 0.3
_MIN_RETRY_S = 0.1


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

    A ``background`` load has no waiters and takes no slot from anybody: it brings back what a restart lost.
    """

    __slots__ = (
        "adapter", "background", "base", "blocked_since", "digest", "drained", "engine", "order", "rank", "size",
        "stage", "started", "victim", "waiters",
    )  # fmt: skip

    def __init__(
        self, base: str, adapter: str, digest: str, size: int, rank: int, order: int, background: bool = False
    ) -> None:
        self.base = base
        self.adapter = adapter
        self.digest = digest
        self.size = size
        self.rank = rank
        self.order = order
        self.background = background
        self.stage = Stage.WAITING
        self.waiters: dict[LeaseKey, Waiter] = {}
        self.engine = ""
        self.victim = ""
        self.started = 0.0
        # since when it is known that a slot or the arena's room, not its turn, keeps it from serving
        self.blocked_since: float | None = None
        # the slot that takes no new leases because this load has waited too long
        self.drained: tuple[str, Slot] | None = None

    @property
    def key(self) -> LoadKey:
        return self.base, self.adapter

    def __lt__(self, other: Load) -> bool:
        return (self.background, self.order) < (other.background, other.order)


class LoadQueue:
    """All loads of the node. Waiting ones start in the order of their age, background ones last."""

    def __init__(self, in_flight_limit: int, queue_limit: int) -> None:
        self.limit = in_flight_limit
        self._queue_limit = queue_limit
        self._loads: dict[LoadKey, Load] = {}
        self._waiting: list[Load] = []
        self._order = 0
        self._load_s = _FIRST_GUESS_S

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads.values())

    def get(self, key: LoadKey) -> Load | None:
        return self._loads.get(key)

    def waiting(self) -> list[Load]:
        """A copy, in the order in which they should start."""
        return list(self._waiting)

    @property
    def queued(self) -> int:
        """How many loads that somebody waits for have not started."""
        return sum(not load.background for load in self._waiting)

    @property
    def in_flight(self) -> int:
        return len(self._loads) - len(self._waiting)

    @property
    def may_start(self) -> bool:
        return self.in_flight < self.limit

    @property
    def room(self) -> int:
        """How many more may wait. Below 0 where loads that had started lost their slot and wait again."""
        return self._queue_limit - self.queued

    def add(self, base: str, adapter: str, digest: str, size: int, rank: int, *, background: bool = False) -> Load:
        """A new load, waiting. The caller has checked that there is none of its key."""
        self._order += 1
        load = Load(base, adapter, digest, size, rank, self._order, background)
        self._loads[load.key] = load
        insort(self._waiting, load)
        return load

    def start(self, load: Load, now: float) -> None:
        """Take a waiting load into flight; the caller sets its stage."""
        self._waiting.remove(load)
        load.started = now

    def requeue(self, load: Load) -> None:
        """Back to waiting, at the place that its age gives it."""
        load.stage = Stage.WAITING
        load.engine = load.victim = ""
        insort(self._waiting, load)

    def promote(self, load: Load) -> None:
        """Somebody waits for a background load now: it starts like any other."""
        if load.stage is Stage.WAITING:
            self._waiting.remove(load)
            load.background = False
            insort(self._waiting, load)
        load.background = False

    def remove(self, load: Load) -> None:
        del self._loads[load.key]
        if load.stage is Stage.WAITING:
            self._waiting.remove(load)

    def measured(self, seconds: float) -> None:
        """A load took this long from its start to serving."""
        self._load_s += _SMOOTHING * (seconds - self._load_s)

    def retry_after_s(self) -> float:
        """How long until what is in flight and queued now will have been loaded, going by what loads took lately."""
        return max(_MIN_RETRY_S, self._load_s * len(self._loads) / self.limit)
