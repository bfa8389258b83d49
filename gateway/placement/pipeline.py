"""Filters, candidate order, scores, one choice."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gateway.nodes import Node

from .demand import Demand
from .filters import FILTERS
from .rendezvous import order
from .scorers import total

# how many nodes, first in a policy's own order, are looked at: the first, and one to spill to
REACH = 2


def place(demand: Demand, nodes: Sequence[Node], *, excluded: Collection[str] = (), reach: int = REACH) -> Node:
    """The node for ``demand``. Raises what the filter that left none says.

    ``excluded`` nodes failed this request a moment ago, but may have another engine: like nodes in doubt they are taken
    only where nothing else is left.
    """
    fitting = fit(demand, nodes)
    if len(fitting) == 1:
        return fitting[0]
    preferred = [node for node in fitting if not node.doubtful and node.name not in excluded] or fitting
    if not demand.digest:
        return least_busy(preferred)
    return best(demand, candidates(demand, preferred, reach))


def fit(demand: Demand, nodes: Sequence[Node]) -> Sequence[Node]:
    """The nodes that can take ``demand``; at least one, or the refusal is raised."""
    for rule in FILTERS:
        nodes = [node for node in nodes if rule.keeps(node, demand)]
        if not nodes:
            raise rule.refusal(demand)
    return nodes


def candidates(demand: Demand, nodes: Sequence[Node], reach: int) -> list[Node]:
    """The first ``reach`` nodes in the policy's own order."""
    by_name = {node.name: node for node in nodes}
    return [by_name[name] for name in order(demand.policy, by_name)[:reach]]


def best(demand: Demand, ordered: Sequence[Node]) -> Node:
    """The highest score; among equals the first in order."""
    return max(ordered, key=lambda node: total(node, demand))


def least_busy(nodes: Sequence[Node]) -> Node:
    """For base requests: the fewest leases, by report or of this gateway, whichever knows of more; then by name.

    A base is on every node already, so that there is nothing gateways would have to agree on.
    """
    return min(nodes, key=lambda node: (max(node.leased, node.outstanding), node.name))
