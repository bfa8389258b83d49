"""When the turn of a load comes, as told to those who are refused, and how often that was true."""

from __future__ import annotations

from collections import Counter

from .admission import Load, LoadQueue, Stage
from .pace import Pace
from .promises import Promises
from .slots import LoadKey
from .turns import length

_MIN_RETRY_S = 0.1
_ACCURATE = 2.0
# who comes a little early waits for the rest in the queue; who comes late had room kept for nothing
_EARLY = 0.9


def demands(queue: LoadQueue, promises: Promises) -> dict[str, float]:
    """How many loads each tenant has waiting, or will have once those come back who were told to."""
    found: dict[str, float] = dict(queue.turns.tenants())
    for tenant in promises.tenants():
        found[tenant] = found.get(tenant, 0.0) + promises.pending(tenant)
    return found


class Estimates:
    """Makes promises of what the queue's length and its drain rate say, and looks what became of them."""

    def __init__(self, queue: LoadQueue, promises: Promises, pace: Pace, counts: Counter[str]) -> None:
        """``counts`` gets what became of the estimates: of those who came back, how many were within a factor of two
        of the truth."""
        self._queue = queue
        self._promises = promises
        self._pace = pace
        self._counts = counts

    def come_back_s(self, tenant: str, key: LoadKey, now: float, *, order: int = 0) -> float:
        """When a request refused now should come back: when the turn of the load that it needs would come.

        ``order`` is the age of a load that had been let in; without it, it comes after all to whom something is
        promised.
        """
        promise = self._promises.get(tenant, key)
        if promise is None:
            before = self._promises.late(tenant) if order else self._promises.pending(tenant)
        elif now < promise.due:
            return promise.due - now
        else:
            before = self._promises.late(tenant)
        expected_s = self._drains_in_s(key[0], tenant, before + self._queue.turns.of(tenant) + 1.0, now)
        after_s = max(_MIN_RETRY_S, _EARLY * expected_s)
        self._promises.make(tenant, key, order or self._queue.next_order(), now, after_s)
        return after_s

    def serves_in_s(self, load: Load, now: float) -> float:
        """When ``load`` will probably serve."""
        load_s = self._queue.times.load_s
        if load.stage is not Stage.WAITING:
            return max(_MIN_RETRY_S, load.started + load_s - now)
        before = sum(other < load for other in self._queue.turns.items(load.tenant))
        return self._drains_in_s(load.base, load.tenant, before + 1.0, now) + load_s

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
        self._counts["retry_after_unclaimed"] += self._promises.expire(now)

    def _drains_in_s(self, base: str, tenant: str, own: float, now: float) -> float:
        """Seconds until ``own`` loads of ``tenant`` will have left the queue, and others by then: it goes in rounds."""
        others = (count for name, count in demands(self._queue, self._promises).items() if name != tenant)
        before = sum(min(count, own * length(count / own)) for count in others)
        drains_in_s = self._queue.drains_in_s(own + before, now)
        return max(drains_in_s, own * self._pace.interval_s(base, tenant, now))
