"""Who may wait for a cold load, who makes room for whom, and when those refused should come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .admission import Load, LoadQueue, Stage
from .promises import Promise, Promises
from .settings import SidecarSettings
from .slots import LoadKey

_MIN_RETRY_S = 0.1
# below this share of its bound the queue takes whoever comes: places kept for those who may come back are no reason
# to let the engines run out of work
_LOW_SHARE = 0.25
_ACCURATE = 2.0
# who comes a little early waits for the rest in the queue; who comes late had room kept for nothing
_EARLY = 0.9


def fair_share(demands: Iterable[float], bound: int) -> float:
    """The most that each may have so that all together have no more than ``bound``: max-min fairness.

    Those who ask for less get what they ask for, and leave the rest to the others.
    """
    left = float(bound)
    ascending = sorted(demands)
    for place, demand in enumerate(ascending):
        share = left / (len(ascending) - place)
        if demand >= share:
            return share
        left -= demand
    return float(bound)


class Gate:
    """The bounds on waiting: one for the node, and one for each tenant within it, which is its fair share at most.

    A full queue gives a place to a tenant that has less than its share, at the expense of the one that has most. Places
    that become free belong to those who were told to come back for them, before newcomers.
    """

    def __init__(self, settings: SidecarSettings, queue: LoadQueue, counts: Counter[str]) -> None:
        """``counts`` gets what became of the estimates: of those who came back, how many were within a factor of two
        of the truth."""
        self._node = settings.node
        self._queue = queue
        self._bound = settings.loads_queued
        self._tenant_bound = min(settings.loads_queued_per_tenant, settings.loads_queued)
        self.promises = Promises()
        self._counts = counts

    def closed(self, tenant: str, key: LoadKey, now: float) -> str | None:
        """Why one more load of ``tenant`` may not wait now; None where it may."""
        own, low = self._queue.turns.of(tenant), self._queue.queued < self._low
        share = self._tenant_bound if low else self._share(tenant, self._demands())
        if own >= share:
            return f"{own} loads of tenant {tenant} wait on node {self._node} already"
        room = self._room(own, share)
        if room <= 0:
            return f"{self._queue.in_flight} loads are in flight and {self._queue.queued} wait on node {self._node}"
        promise = self.promises.get(tenant, key)
        if low or (promise is not None and now >= promise.due):
            return None
        if room <= self.promises.pending(tenant) - (promise is not None):
            return f"the next places on node {self._node} are promised to requests of tenant {tenant} that came before"
        return None

    def too_many(self) -> Load | None:
        """What has to go where more wait than may: the youngest load of the tenant that has most."""
        waiting = self._queue.turns.tenants()
        return self._queue.turns.youngest(max(waiting, key=lambda name: waiting[name])) if self._places < 0 else None

    def let_in(self, tenant: str, key: LoadKey) -> Promise | None:
        """A load of ``tenant`` may wait: what was promised to who came back for it, if anything was."""
        return self.promises.redeem(tenant, key)

    def started(self, load: Load, now: float) -> None:
        """The turn of ``load`` has come."""
        promise, load.promise = load.promise, None
        if promise is not None:
            true = 1.0 / _ACCURATE <= promise.accuracy(now) <= _ACCURATE
            self._counts["retry_after_true" if true else "retry_after_off"] += 1

    def put_out(self, load: Load) -> None:
        """``load`` had been let in and has to go all the same: what was promised to it did not come true."""
        if load.promise is not None:
            self._counts["retry_after_off"] += 1

    def expire(self, now: float) -> None:
        """Forget promises that nobody came back for."""
        self._counts["retry_after_unclaimed"] += self.promises.expire(now)

    def come_back_s(self, tenant: str, key: LoadKey, now: float, *, order: int = 0) -> float:
        """When a request refused now should come back: when the turn of the load that it needs would come.

        ``order`` is the age of a load that had been let in; without it, it comes after all to whom something is
        promised.
        """
        promise = self.promises.get(tenant, key)
        if promise is None:
            before = self.promises.late(tenant) if order else self.promises.pending(tenant)
        elif now < promise.due:
            return promise.due - now
        else:
            before = self.promises.late(tenant)
        waiting = self._queue.turns.of(tenant)
        expected_s = self._queue.drains_in_s(_departures(tenant, before + waiting + 1.0, self._demands()), now)
        after_s = max(_MIN_RETRY_S, _EARLY * expected_s)
        self.promises.make(tenant, key, order or self._queue.next_order(), now, after_s)
        return after_s

    def serves_in_s(self, load: Load, now: float) -> float:
        """When ``load`` will probably serve."""
        load_s = self._queue.times.load_s
        if load.stage is not Stage.WAITING:
            return max(_MIN_RETRY_S, load.started + load_s - now)
        before = sum(other < load for other in self._queue.turns.items(load.tenant))
        return self._queue.drains_in_s(_departures(load.tenant, before + 1.0, self._demands()), now) + load_s

    def _demands(self) -> dict[str, float]:
        """How many loads each tenant has waiting, or will have once those come back who were told to."""
        demands: dict[str, float] = dict(self._queue.turns.tenants())
        for tenant in self.promises.tenants():
            demands[tenant] = demands.get(tenant, 0.0) + self.promises.pending(tenant)
        return demands

    def _share(self, tenant: str, demands: dict[str, float]) -> int:
        """How many loads of ``tenant`` may wait while others want to, too: at least one."""
        wanted = demands.get(tenant, 0.0) + 1.0
        others = (demand for name, demand in demands.items() if name != tenant)
        return max(1, min(self._tenant_bound, int(fair_share((wanted, *others), self._bound))))

    def _room(self, own: int, share: int) -> int:
        """How many more loads of a tenant that has ``own`` waiting, of ``share``, could wait now.

        In a full queue it is one, at the expense of another tenant that would have no less even then.
        """
        places = self._places
        if places <= 0:
            places = int(max(self._queue.turns.tenants().values(), default=0) > own + 1)
        return min(share - own, places)

    @property
    def _places(self) -> int:
        return self._bound - self._queue.queued

    @property
    def _low(self) -> float:
        return max(_LOW_SHARE * self._bound, float(self._queue.limit))


def _departures(tenant: str, own: float, demands: dict[str, float]) -> float:
    """How many loads will have left the queue by the time that ``own`` of ``tenant``'s have: it goes in rounds."""
    return own + sum(min(count, own) for name, count in demands.items() if name != tenant)
