"""Times to come back that were given to those refused, and that are kept.

A refusal says when the turn of its load would come. Who comes back then finds room, and goes ahead of all that came
after it was refused. Until then places that become free are kept for those who were promised one, as far as they are
known to come back: without that the newcomers of every moment would take each place, and no estimate could be true.
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from .timers import Timers

# how many are remembered: who was refused past that gets an estimate, but no place is kept
_MOST = 4096
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


class Promises:
    """Of each tenant, in the order in which they were made; one a key."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[Hashable, Promise]] = {}
        self._late: dict[str, int] = {}
        self._expiries: Timers[tuple[str, Hashable]] = Timers()
        self._returning = 1.0

    def __len__(self) -> int:
        return len(self._expiries)

    def tenants(self) -> list[str]:
        """Those to whom anything is promised."""
        return list(self._tenants)

    def get(self, tenant: str, key: Hashable) -> Promise | None:
        return self._tenants.get(tenant, {}).get(key)

    def pending(self, tenant: str) -> float:
        """How many of ``tenant`` will come back, going by how many did lately."""
        return self._returning * len(self._tenants.get(tenant, ()))

    def late(self, tenant: str) -> float:
        """How many of ``tenant`` should have had their place already, and will come back."""
        return self._returning * self._late.get(tenant, 0)

    def make(self, tenant: str, key: Hashable, order: int, now: float, after_s: float) -> None:
        """Somebody was told to come back ``after_s`` from now. Told so again, the first time counts as before."""
        promise = self.get(tenant, key)
        if promise is None:
            if len(self) >= _MOST:
                return
            promise = self._tenants.setdefault(tenant, {})[key] = Promise(order, now, after_s, now + after_s)
        elif now >= promise.due and not promise.late:
            promise.late = True
            self._late[tenant] = self._late.get(tenant, 0) + 1
        promise.due = max(promise.due, now + after_s)
        self._expiries.set((tenant, key), promise.expires)

    def redeem(self, tenant: str, key: Hashable) -> Promise | None:
        """Somebody who was refused is back and gets in."""
        promise = self._take(tenant, key)
        if promise is not None:
            self._count_return(1.0)
        return promise

    def expire(self, now: float) -> int:
        """Forget those that nobody came back for in time; how many there were."""
        gone = self._expiries.due(now)
        for tenant, key in gone:
            self._take(tenant, key)
            self._count_return(0.0)
        return len(gone)

    def _take(self, tenant: str, key: Hashable) -> Promise | None:
        promises = self._tenants.get(tenant)
        promise = promises.pop(key, None) if promises is not None else None
        if promises is None or promise is None:
            return None
        self._expiries.cancel((tenant, key))
        if promise.late:
            self._late[tenant] -= 1
        if not promises:
            del self._tenants[tenant]
            self._late.pop(tenant, None)
        return promise

    def _count_return(self, came: float) -> None:
        self._returning += _WEIGHT * (came - self._returning)
