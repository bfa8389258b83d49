"""Filters, candidate order, scores, one choice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gateway.nodes import Node

from .demand import Demand
from .filters import eligible, refusal
from .rendezvous import Rendezvous
from .scorers import total

# how many nodes, first in a policy's own order, are looked at: the first, and one to spill to
REACH = 2
# of each policy's order this much is remembered, for so many policies: enough to pass over a few dead nodes
_SHORT_LIST = 8
_REMEMBERED = 65_536


class Placer:
    """Chooses among ``nodes``. What it remembers only saves time: the choice follows from the nodes' state alone."""

    def __init__(self, nodes: Sequence[Node], *, reach: int = REACH) -> None:
        self._nodes = tuple(nodes)
        self._by_name = {node.name: node for node in nodes}
        self._rendezvous = Rendezvous(self._by_name)
        self._reach = reach
        self._short_lists: dict[str, tuple[Node, ...]] = {}

    def place(self, demand: Demand, *, excluded: Collection[str] = ()) -> Node:
        """The node for ``demand``. Raises BaseNotDeployed, Unfit or NoHealthyNode where there is none.

        ``excluded`` nodes failed this request a moment ago, but may have another engine: like nodes in doubt they are
        taken only where nothing else is left.
        """
        nodes = self._nodes
        if len(nodes) == 1 and eligible(nodes[0], demand):
            return nodes[0]
        if not demand.digest:
            return least_busy(self._preferred(nodes, demand, excluded))
        return best(self._candidates(demand, excluded), demand)

    def _candidates(self, demand: Demand, excluded: Collection[str]) -> Sequence[Node]:
        """The first ``reach`` nodes in the policy's order that can take it; at least one."""
        found = first_eligible(self._short_list(demand.policy), demand, excluded, self._reach)
        if len(found) < self._reach and len(self._nodes) > _SHORT_LIST:
            found = first_eligible(self._order(demand.policy), demand, excluded, self._reach)
        return found or self._preferred(self._order(demand.policy), demand, excluded)[: self._reach]

    def _preferred(self, nodes: Iterable[Node], demand: Demand, excluded: Collection[str]) -> list[Node]:
        """The eligible nodes without those excluded or in doubt, or if that leaves none, with them."""
        fitting = [node for node in nodes if eligible(node, demand)]
        if not fitting:
            raise refusal(self._nodes, demand)
        return [node for node in fitting if not node.doubtful and node.name not in excluded] or fitting

    def _short_list(self, policy: str) -> tuple[Node, ...]:
        known = self._short_lists.get(policy)
        if known is None:
            if len(self._short_lists) >= _REMEMBERED:
                self._short_lists.clear()
            known = self._short_lists[policy] = tuple(self._order(policy)[:_SHORT_LIST])
        return known

    def _order(self, policy: str) -> list[Node]:
        return [self._by_name[name] for name in self._rendezvous.order(policy)]


def first_eligible(nodes: Iterable[Node], demand: Demand, excluded: Collection[str], count: int) -> list[Node]:
    """The first ``count`` nodes that can take ``demand`` and are neither excluded nor in doubt."""
    found: list[Node] = []
    for node in nodes:
        if not node.doubtful and node.name not in excluded and eligible(node, demand):
            found.append(node)
            if len(found) == count:
                break
    return found


def best(ordered: Sequence[Node], demand: Demand) -> Node:
    """The highest score; among equals the first in order."""
    if len(ordered) == 1:
        return ordered[0]
    return max(ordered, key=lambda node: total(node, demand))


def least_busy(nodes: Sequence[Node]) -> Node:
    """For base requests: the fewest leases, by report or of this gateway, whichever knows of more; then by name.

    A base is on every node already, so that there is nothing gateways would have to agree on.
    """
    return min(nodes, key=lambda node: (max(node.leased, node.outstanding), node.name))
