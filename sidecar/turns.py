"""Whose turn it is: fair queueing over tenants, those that had nothing waiting first.

What each tenant has had decides, as in deficit round robin (Shreedhar and Varghese, 1995), with the two lists of
FQ-CoDel (RFC 8290, section 4): a tenant that comes with its first item is served ahead of those that are always
waiting, once; after that it takes its place like everybody else. Turns of equal length let the queues of tenants that
ask for as much drift apart, and one waits twice as long as another by chance. So a tenant of which somewhat more waits
than of others has longer turns, and waits about as long; a flood, of which many times as much waits, has not.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar


class Orderable(Protocol):
    """Of two items of a tenant, the lesser is the older one, and goes first."""

    def __lt__(self, other: Any) -> bool: ...


Item = TypeVar("Item", bound=Orderable)


# how many times as long as others' a tenant's turn may be. It is so where as many times as much of it waits as of the
# others in the mean; with more than that, it is the less a tenant like the others, and the more a flood
LONGEST = 2.0


def length(more: float) -> float:
    """Of the turns of a tenant of which ``more`` times as much waits as of others, in turns of theirs."""
    return max(1.0, min(more, 2.0 * LONGEST - more))


class _Flow(Generic[Item]):
    """One tenant: what it has waiting, and what it has had, over the length of its turns."""

    __slots__ = ("had", "items", "new", "tenant")

    def __init__(self, tenant: str, had: float) -> None:
        self.tenant = tenant
        self.had = had
        self.new = True
        self.items: list[Item] = []


class Charge(NamedTuple):
    """What a turn was booked at, and on whom."""

    flow: _Flow[Any]
    amount: float


class Turns(Generic[Item]):
    """Waiting items by tenant. Costs are in any one unit, and positive.

    A tenant that waits all the time gets at least a ``LONGEST``-th of what any other gets, and as much as one of which
    less waits, or very much more.
    """

    def __init__(self) -> None:
        # those of whom something waits, and those that have had more than the least of them
        self._flows: dict[str, _Flow[Item]] = {}
        self._least = 0.0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return self._count > 0

    def __iter__(self) -> Iterator[Item]:
        for flow in self._flows.values():
            yield from flow.items

    def of(self, tenant: str) -> int:
        """How many items of ``tenant`` wait."""
        flow = self._flows.get(tenant)
        return len(flow.items) if flow else 0

    def items(self, tenant: str) -> list[Item]:
        """What waits of ``tenant``, the oldest first."""
        flow = self._flows.get(tenant)
        return list(flow.items) if flow else []

    def tenants(self) -> dict[str, int]:
        """How many items wait of each tenant that has any."""
        return {tenant: len(flow.items) for tenant, flow in self._flows.items() if flow.items}

    def longest(self, most: int) -> list[tuple[str, int]]:
        """The ``most`` tenants that have most waiting, with how many they have."""
        return heapq.nlargest(most, self.tenants().items(), key=lambda pair: pair[1])

    def youngest(self, tenant: str) -> Item:
        """The item of ``tenant``, which has one, whose turn would come last."""
        return self._flows[tenant].items[-1]

    def add(self, tenant: str, item: Item, cost: float) -> None:
        """``item`` waits, at the place that its age gives it among those of its tenant."""
        self._forget_the_idle()
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = _Flow(tenant, self._least)
        insort(flow.items, item)
        self._count += 1

    def remove(self, tenant: str, item: Item) -> None:
        """``item`` waits no more. What its tenant has had is remembered until the others have had more."""
        self._flows[tenant].items.remove(item)
        self._count -= 1
        if not self._count:
            self._flows.clear()
            self._least = 0.0

    def charge(self, tenant: str, cost: float) -> Charge | None:
        """An item of ``tenant`` had its turn. None where nothing is booked, as nobody waits."""
        flow = self._flows.get(tenant)
        if flow is None:
            return None
        charge = Charge(flow, cost / self._length(flow))
        flow.had += charge.amount
        flow.new = False
        return charge

    def give_back(self, charge: Charge) -> None:
        """``charge`` was in vain. What was forgotten since is not owed: a tenant made anew was never charged it."""
        if self._flows.get(charge.flow.tenant) is charge.flow:
            charge.flow.had -= charge.amount

    def order(self) -> Iterator[Item]:
        """Every waiting item once, each when it is its turn.

        Whoever takes one removes and charges it before going on. What can't be taken now keeps its place, and its
        tenant's next one is tried. What is added meanwhile is not seen.
        """
        self._forget_the_idle()
        turns = [
            _turn(flow, place, untried)
            for place, flow in enumerate(self._flows.values())
            if (untried := deque(flow.items))
        ]
        heapq.heapify(turns)
        while turns:
            *_, place, flow, untried = heapq.heappop(turns)
            yield untried.popleft()
            if untried:
                heapq.heappush(turns, _turn(flow, place, untried))

    def _length(self, flow: _Flow[Item]) -> float:
        """Of the turn that an item of ``flow`` just had, the item included."""
        others = sum(bool(other.items) for other in self._flows.values() if other is not flow)
        if not others:
            return 1.0
        own = len(flow.items) + 1
        return length(own * others / (self._count + 1 - own))

    def _forget_the_idle(self) -> None:
        """Tenants of whom nothing waits are as good as new once everybody who waits has had more."""
        waiting = [flow.had for flow in self._flows.values() if flow.items]
        self._least = max(self._least, min(waiting, default=self._least))
        for flow in [flow for flow in self._flows.values() if not flow.items and flow.had < self._least]:
            del self._flows[flow.tenant]


def _turn(flow: _Flow[Item], place: int, untried: deque[Item]) -> tuple[Any, ...]:
    """The lesser goes first: new tenants as they came, then whoever has had least, then the oldest item.

    ``place`` tells turns apart.
    """
    if flow.new:
        return 0, 0.0, place, place, flow, untried
    return 1, flow.had, untried[0], place, flow, untried
