"""Which nodes have more than their share, by reports alone."""

from __future__ import annotations

import math

from gateway.deployments import Deployed
from gateway.nodes import Node, NodeTable

from .rendezvous import fraction, word_of
from .tuning import Tuning


class Bounds:
    """Compares nodes with the mean of all that take work: leases by their engines, adapters by their slots."""

    def __init__(self, table: NodeTable, tuning: Tuning) -> None:
        self._table = table
        self._tuning = tuning

    def overflow(self, node: Node, deployed: Deployed) -> float:
        """The share of its leases that is too much for ``node``; 0 where it has no more than it should."""
        own = node.share(deployed)
        if own.outstanding <= self._tuning.quiet_leases * own.ready:
            return 0.0
        total = self._table.totals(deployed)
        fair = total.outstanding * own.ready / total.ready * (1 + self._tuning.spill_excess)
        most = max(float(self._tuning.quiet_leases * own.ready), fair)
        return max(0.0, 1 - most / own.outstanding)

    def spills(self, node: Node, deployed: Deployed, policy: str) -> bool:
        """Whether ``policy`` is of that share: no more of a node's policies go elsewhere than it has too many."""
        overflow = self.overflow(node, deployed)
        return overflow > 0 and fraction(word_of(policy), word_of(node.name)) < overflow

    def full(self, node: Node, deployed: Deployed, *, has_bytes: bool) -> bool:
        """Whether one adapter more would be too much for ``node``, of adapters or of work."""
        own = node.share(deployed)
        total = self._table.totals(deployed)
        if not own.slots:
            return True
        excess = self._tuning.spill_excess if has_bytes else self._tuning.placed_excess
        most = math.ceil((1 + excess) * (total.adapters + 1) * own.slots / total.slots)
        # the first few of many slots say nothing about how evenly the rest will come
        return own.adapters >= max(most, own.slots // 8) or self.overflow(node, deployed) > 0

    def crowding(self, node: Node, deployed: Deployed) -> float:
        """How full ``node`` is: adapters a slot, to tell the least full of those that all are."""
        own = node.share(deployed)
        return own.adapters / own.slots if own.slots else math.inf
