"""Whose turn it is: deficit round robin over tenants, those that had nothing waiting first.

Deficit round robin (Shreedhar and Varghese, 1995) with the two lists of FQ-CoDel (RFC 8290, section 4): a tenant that
comes with its first item is served ahead of those that are always waiting, once; after that it takes its place in the
round like everybody else.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar


class Orderable(Protocol):
    """Of two items of a tenant, the lesser is the older one, and goes first."""

    def __lt__(self, other: Any) -> bool: ...


# what a quantum keeps from one item that comes to the next, so that one large item is not for ever the measure
_FADING = 0.98

Item = TypeVar("Item", bound=Orderable)


class _Flow(Generic[Item]):
    """One tenant: what it has waiting, and what it may still spend before its turn is over."""

    __slots__ = ("deficit", "items", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.deficit = 0.0
        self.items: list[Item] = []


class Turns(Generic[Item]):
    """Waiting items by tenant. Costs are in any one unit, and positive; a quantum is the largest of late.

    So a tenant's turn is at least one item long, and between two turns of a tenant every other one gets at most one
    quantum and the item that used it up.
    """

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[Item]] = {}
        # in the order of their turns; each flow is in one of them
        self._new: dict[str, _Flow[Item]] = {}
        self._old: dict[str, _Flow[Item]] = {}
        self._quantum = 0.0
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
        self._quantum = max(_FADING * self._quantum, cost)
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = self._new[tenant] = _Flow(tenant)
        insort(flow.items, item)
        self._count += 1

    def remove(self, tenant: str, item: Item) -> None:
        """``item`` waits no more. Its tenant keeps its place in the round until its turn comes."""
        self._flows[tenant].items.remove(item)
        self._count -= 1
        if not self._count:
            self._flows.clear()
            self._new.clear()
            self._old.clear()
            self._quantum = 0.0

    def charge(self, tenant: str, cost: float) -> None:
        """An item of ``tenant`` had its turn; a negative ``cost`` gives back what was charged in vain."""
        flow = self._flows.get(tenant)
        if flow is not None:
            flow.deficit -= cost

    def order(self) -> Iterator[Item]:
        """Every waiting item once, each when it is its turn.

        Whoever takes one removes and charges it before going on. What can't be taken now keeps its place, and its
        tenant's next one is tried. What is added meanwhile is not seen.
        """
        ring = deque((flow, iter(tuple(flow.items))) for flow in (*self._new.values(), *self._old.values()))
        while ring:
            flow, untried = ring[0]
            if flow.items and flow.deficit < 0.0:
                flow.deficit += self._quantum
                self._to_the_end(flow)
                ring.rotate(-1)
                continue
            item = next(untried, None)
            if item is not None:
                yield item
                continue
            ring.popleft()
            if not flow.items:
                self._retire(flow)

    def _to_the_end(self, flow: _Flow[Item]) -> None:
        if self._flows.get(flow.tenant) is flow:
            self._new.pop(flow.tenant, None)
            self._old.pop(flow.tenant, None)
            self._old[flow.tenant] = flow

    def _retire(self, flow: _Flow[Item]) -> None:
        """It has nothing waiting. One that was new stays for a round, or coming again at once would always pay."""
        if self._new.get(flow.tenant) is flow:
            self._to_the_end(flow)
        elif self._old.get(flow.tenant) is flow:
            del self._old[flow.tenant]
            del self._flows[flow.tenant]
