"""The nodes that run one base, and each policy's order of them."""

from __future__ import annotations

from gateway.deployments import Deployed
from gateway.nodes import Node, NodeTable

from .rendezvous import Rendezvous

# how far along its order a policy that few ask for may be, and for how many policies that is remembered
SHORT_LIST = 8
_REMEMBERED = 65_536


class Pool:
    """The nodes of ``table`` that run a base, silent ones too: what moves policies is who is a member, not how it is.

    ``members`` are the nodes with their weights, ``version`` that of the table which they are of. What is remembered
    only saves time.
    """

    def __init__(self, deployed: Deployed, table: NodeTable) -> None:
        self.version = table.version
        self.members = {node: found.weight for node in table if (found := node.deployment(*deployed)) is not None}
        self._by_name = {node.name: node for node in sorted(self.members, key=lambda node: node.name)}
        self.nodes = tuple(self._by_name.values())
        self._rendezvous = Rendezvous(self._by_name, {node.name: weight for node, weight in self.members.items()})
        self._short_lists: dict[str, tuple[Node, ...]] = {}

    def first(self, policy: str, count: int) -> tuple[Node, ...]:
        """At least the first ``count`` nodes in the policy's order, where there are as many."""
        known = self._short_lists.get(policy)
        if known is None or len(known) < min(count, len(self.nodes)):
            if len(self._short_lists) >= _REMEMBERED:
                self._short_lists.clear()
            known = self._short_lists[policy] = self.order(policy, count)
        return known

    def order(self, policy: str, count: int | None = None) -> tuple[Node, ...]:
        """The first ``count`` nodes in the policy's order, or all."""
        return tuple(self._by_name[name] for name in self._rendezvous.order(policy, count))
