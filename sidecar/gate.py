"""Who may wait for a cold load, who makes room for whom, and when those refused should come back."""

from __future__ import annotations

from collections import Counter

from .admission import Load, LoadQueue, Stage
from .promises import Promises
from .settings import SidecarSettings
from .slots import LoadKey

_MIN_RETRY_S = 0.1
# below this share of its bound the queue takes whoever comes: places kept for those who may come back are no reason
# to let the engines run out of work
_LOW_SHARE = 0.25
_ACCURATE = 2.0


class Gate:
    """The bounds on waiting: one for the node, and one for each tenant within it.

    A full queue gives a place to a tenant that has fewer than another, at the other's expense. Places that become free
    belong to those who were told to come back for them, in that order.
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
        own = self._queue.turns.of(tenant)
        if own >= self._tenant_bound:
            return f"{own} loads of tenant {tenant} wait on node {self._node} already"
        if self._places <= 0 and self.crowded_by(tenant) is None:
            return f"{self._queue.in_flight} loads are in flight and {self._queue.queued} wait on node {self._node}"
        promise = self.promises.get(tenant, key)
        if (promise is not None and now >= promise.due) or self._queue.queued < self._low:
            return None
        if self._room(tenant) <= self.promises.pending(tenant) - (promise is not None):
            return f"the next places on node {self._node} are promised to requests of tenant {tenant} that came before"
        return None

    @property
    def full(self) -> bool:
        """Whether more wait than may: somebody has to go."""
        return self._places < 0

    def crowded_by(self, tenant: str) -> Load | None:
        """The youngest load of the tenant that has most waiting, if ``tenant`` would not have more with its place."""
        waiting = self._queue.turns.tenants()
        if not waiting:
            return None
        most = max(waiting, key=lambda name: waiting[name])
        return self._queue.turns.youngest(most) if waiting[most] > waiting.get(tenant, 0) + 1 else None

    def last(self) -> Load:
        """The youngest load of the tenant that has most waiting."""
        waiting = self._queue.turns.tenants()
        return self._queue.turns.youngest(max(waiting, key=lambda name: waiting[name]))

    def let_in(self, tenant: str, key: LoadKey, now: float) -> None:
        """A load of ``tenant`` may wait: somebody may have come back for it."""
        promise = self.promises.redeem(tenant, key)
        if promise is not None:
            true = 1.0 / _ACCURATE <= promise.accuracy(now) <= _ACCURATE
            self._counts["retry_after_true" if true else "retry_after_off"] += 1

    def freed(self, tenant: str, now: float) -> None:
        """A load of ``tenant`` waits no more."""
        self.promises.room(tenant, self._room(tenant), now)

    def expire(self, now: float) -> None:
        """Forget promises that nobody came back for."""
        self._counts["retry_after_unclaimed"] += self.promises.expire(now)

    def come_back_s(self, tenant: str, key: LoadKey, now: float) -> float:
        """When a request refused now should come back, to find room for the load that it needs: a promise."""
        promise = self.promises.get(tenant, key)
        if promise is None:
            first = self.promises.pending(tenant)
        elif now < promise.due:
            return promise.due - now
        else:
            first = self.promises.late(tenant)
        after_s = max(_MIN_RETRY_S, self._queue.drains_in_s(self._departures(tenant, first + 1.0), now))
        self.promises.make(tenant, key, now, after_s)
        return after_s

    def serves_in_s(self, load: Load, now: float) -> float:
        """When ``load`` will probably serve."""
        load_s = self._queue.times.load_s
        if load.stage is not Stage.WAITING:
            return max(_MIN_RETRY_S, load.started + load_s - now)
        before = sum(other < load for other in self._queue.turns.items(load.tenant))
        return self._queue.drains_in_s(self._departures(load.tenant, before + 1.0), now) + load_s

    def _departures(self, tenant: str, own: float) -> float:
        """How many loads will have left the queue by the time that ``own`` of ``tenant``'s have: it goes in rounds."""
        waiting = self._queue.turns.tenants()
        return own + sum(min(count, own) for other, count in waiting.items() if other != tenant)

    def _room(self, tenant: str) -> int:
        own = self._tenant_bound - self._queue.turns.of(tenant)
        return min(own, max(self._places, 1 if self.crowded_by(tenant) else 0))

    @property
    def _places(self) -> int:
        return self._bound - self._queue.queued

    @property
    def _low(self) -> float:
        return max(_LOW_SHARE * self._bound, float(self._queue.limit))
