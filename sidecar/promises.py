"""Times to come back that were given to those refused, and that are kept.

A refusal says when the turn of its load would come. Who comes back then finds room, and goes ahead of all that came
after it was refused. Until then places that become free are kept for those who were promised one, as far as they are
known to come back: without that the newcomers of every moment would take each place, and no estimate could be true.
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from .timers import Timers

# how many are remembered, of which each tenant has its share, and of how many tenants: who was refused past that gets
# an estimate, but no place is kept
_MOST = 4096
_MOST_TENANTS = 1024
# how late somebody may come back: answers take their time, clients wait whole seconds and a little more
_GRACE_S = 2.0
_GRACE_SHARE = 0.5
# weight of one more client that came back, or did not, in the share that does
_WEIGHT = 0.05
# estimates are told in whole seconds, so shorter ones can't be told apart
_RESOLUTION_S = 1.0


class Promise(msgspec.Struct):
    """Somebody was refused first at ``made``, to come back at ``due``; ``first_s`` is what was told at first.

    ``order`` is the age that its load will have in the queue; ``late``: there was no room when it came back in time.
    """

    order: int
    made: float
    first_s: float
    due: float
    late: bool = False

    def accuracy(self, now: float) -> float:
        """The estimate over the truth, for one whose turn comes now: 1 is exact, more is too long."""
        return max(self.first_s, _RESOLUTION_S) / max(now - self.made, _RESOLUTION_S)

    @property
    def expires(self) -> float:
        return self.due + max(_GRACE_S, _GRACE_SHARE * (self.due - self.made))


class _Tenant:
    """What was promised to one tenant, how many of that are late, and which share of it comes back."""

    __slots__ = ("late", "promises", "returning")

    def __init__(self) -> None:
        self.promises: dict[Hashable, Promise] = {}
        self.late = 0
        self.returning = 1.0


class Promises:
    """Of each tenant, in the order in which they were made; one a key. No tenant's change anything for another's.

    A tenant to which nothing is promised any more is remembered, for the share of its requests that came back, until
    there are too many.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        # those to whom something is promised
        self._pending: dict[str, _Tenant] = {}
        self._expiries: Timers[tuple[str, Hashable]] = Timers()

    def __len__(self) -> int:
        return len(self._expiries)

    def tenants(self) -> list[str]:
        """Those to whom anything is promised."""
        return list(self._pending)

    def get(self, tenant: str, key: Hashable) -> Promise | None:
        known = self._pending.get(tenant)
        return known.promises.get(key) if known else None

    def pending(self, tenant: str) -> float:
        """How many of ``tenant`` will come back, going by how many did lately."""
        known = self._pending.get(tenant)
        return known.returning * len(known.promises) if known else 0.0

    def late(self, tenant: str) -> float:
        """How many of ``tenant`` should have had their place already, and will come back."""
        known = self._pending.get(tenant)
        return known.returning * known.late if known else 0.0

    def make(self, tenant: str, key: Hashable, order: int, now: float, after_s: float) -> None:
        """Somebody was told to come back ``after_s`` from now. Told so again, the first time counts as before."""
        known = self._known(tenant)
        promise = known.promises.get(key) if known else None
        share = _MOST // max(1, len(self._pending))
        if known is None or (promise is None and len(known.promises) >= share):
            return
        if promise is None:
            promise = known.promises[key] = Promise(order, now, after_s, now + after_s)
            self._pending[tenant] = known
        elif now >= promise.due and not promise.late:
            promise.late = True
            known.late += 1
        promise.due = max(promise.due, now + after_s)
        self._expiries.set((tenant, key), promise.expires)

    def redeem(self, tenant: str, key: Hashable) -> Promise | None:
        """Somebody who was refused is back and gets in."""
        return self._take(tenant, key, came=1.0)

    def expire(self, now: float) -> int:
        """Forget those that nobody came back for in time; how many there were."""
        gone = self._expiries.due(now)
        for tenant, key in gone:
            self._take(tenant, key, came=0.0)
        return len(gone)

    def _take(self, tenant: str, key: Hashable, *, came: float) -> Promise | None:
        known = self._pending.get(tenant)
        promise = known.promises.pop(key, None) if known else None
        if known is None or promise is None:
            return None
        self._expiries.cancel((tenant, key))
        known.late -= promise.late
        known.returning += _WEIGHT * (came - known.returning)
        if not known.promises:
            del self._pending[tenant]
        return promise

    def _known(self, tenant: str) -> _Tenant | None:
        """None where something is promised to as many tenants as are remembered."""
        known = self._tenants.pop(tenant, None)
        if known is None:
            if len(self._tenants) >= _MOST_TENANTS:
                left = next((name for name in self._tenants if name not in self._pending), None)
                if left is None:
                    return None
                del self._tenants[left]
            known = _Tenant()
        # those refused lately are forgotten last
        self._tenants[tenant] = known
        return known
