"""Who may wait for a cold load, and who makes room for whom."""

from __future__ import annotations

from collections.abc import Iterable

from .admission import Load, LoadQueue
from .estimates import demands
from .promises import Promises
from .settings import SidecarSettings
from .slots import LoadKey

# below this share of its bound the queue takes whoever comes: places kept for those who may come back are no reason
# to let the engines run out of work
_LOW_SHARE = 0.25
# however fast loads start, no more wait than so many times the bound
_MOST = 16.0


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


def most_queued(settings: SidecarSettings) -> int:
    """How many loads may wait where they start as fast as can be."""
    return int(settings.loads_queued * (_MOST if settings.loads_queued_s else 1.0))


class Gate:
    """The bounds on waiting: one for the node, and one for each tenant within it, which is its fair share at most.

    Both are set for a node whose loads are slow. More may wait where they start soon all the same: to come back later,
    in whole seconds, would take longer. While none starts, both go back to what they are set to, whoever gives up.

    A full queue gives a place to a tenant that has less than its share, at the expense of the one that has most. Places
    that become free belong to those who were told to come back for them, before newcomers.
    """

    def __init__(self, settings: SidecarSettings, queue: LoadQueue, promises: Promises) -> None:
        self._node = settings.node
        self._queue = queue
        self._promises = promises
        self._least = settings.loads_queued
        self._tenant_least = min(settings.loads_queued_per_tenant, settings.loads_queued)
        self._within_s = settings.loads_queued_s

    def closed(self, tenant: str, key: LoadKey, now: float) -> str | None:
        """Why one more load of ``tenant`` may not wait now; None where it may."""
        own, low = self._queue.turns.of(tenant), self._queue.queued < self._low
        bound, share = self._bounds(now)
        if not low:
            share = max(1, min(share, self._share(tenant, demands(self._queue, self._promises), bound)))
        if own >= share:
            return f"{own} loads of tenant {tenant} wait on node {self._node} already"
        room = self._room(own, share, bound)
        if room <= 0:
            return f"{self._queue.in_flight} loads are in flight and {self._queue.queued} wait on node {self._node}"
        promise = self._promises.get(tenant, key)
        if low or (promise is not None and now >= promise.due):
            return None
        if room <= self._promises.pending(tenant) - (promise is not None):
            return f"the next places on node {self._node} are promised to requests of tenant {tenant} that came before"
        return None

    def too_many(self, now: float) -> Load | None:
        """What has to go where more wait than may: the youngest load of the tenant that has most."""
        bound, _ = self._bounds(now)
        if self._queue.queued <= bound:
            return None
        waiting = self._queue.turns.tenants()
        return self._queue.turns.youngest(max(waiting, key=lambda name: waiting[name]))

    @staticmethod
    def _share(tenant: str, wanting: dict[str, float], bound: int) -> int:
        """How many loads of ``tenant`` may wait of ``bound`` while others want to, too."""
        wanted = wanting.get(tenant, 0.0) + 1.0
        others = (demand for name, demand in wanting.items() if name != tenant)
        return int(fair_share((wanted, *others), bound))

    def _room(self, own: int, share: int, bound: int) -> int:
        """How many more loads of a tenant that has ``own`` waiting, of ``share``, could wait now.

        In a full queue it is one, at the expense of another tenant that would have no less even then.
        """
        places = bound - self._queue.queued
        if places <= 0:
            places = int(max(self._queue.turns.tenants().values(), default=0) > own + 1)
        return min(share - own, places)

    def _bounds(self, now: float) -> tuple[int, int]:
        """How many may wait, and how many of one tenant."""
        soon = self._queue.starts_within(self._within_s, now)
        # how many times as many as on a node whose loads are slow
        wider = min(max(1.0, soon / max(1, self._least)), _MOST)
        return int(self._least * wider), int(self._tenant_least * wider)

    @property
    def _low(self) -> float:
        return max(_LOW_SHARE * self._least, float(self._queue.limit))
