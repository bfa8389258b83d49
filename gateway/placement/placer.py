"""From a demand to a node: a base goes where little is going on, a policy along its own order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gateway.deployments import Deployed
from gateway.nodes import Node, NodeTable
from wire.node import Residency

from .bounds import Bounds
from .demand import Demand
from .filters import eligible, refusal
from .pool import SHORT_LIST, Pool
from .tuning import Tuning

# where a revision's bytes are or will be soon
_COMING = frozenset({Residency.FETCHING, Residency.INSTALLING})
_PRESENT = _COMING | {Residency.RESIDENT, Residency.SERVING, Residency.DRAINING}
# of so many nodes, each time others, the least busy one gets a request for the base
_LOOKED_AT = 8


class Placer:
    """Chooses among the nodes of ``table`` as they are at each request. See the package for the rules."""

    def __init__(self, table: NodeTable, tuning: Tuning | None = None) -> None:
        self._table = table
        self._bounds = Bounds(table, tuning or Tuning())
        self._pools: dict[Deployed, Pool] = {}
        self._turn = 0

    def place(
        self, demand: Demand, *, excluded: Collection[str] = (), spread: int = 0, wanted: list[Node] | None = None
    ) -> Node:
        """The node for ``demand``. Raises BaseNotDeployed, Unfit or NoHealthyNode where there is none.

        ``excluded`` nodes failed this request a moment ago, but may have another engine: like nodes in doubt they are
        taken only where nothing else is left. Requests of one ``spread`` go to the same of several copies that serve.
        ``wanted`` gets the nodes of which one should have a copy more, the best first; the request waits for none.
        """
        deployed = demand.base, demand.fingerprint
        pool = self._pools.get(deployed)
        if pool is None or pool.version != self._table.version:
            pool = self._pool(deployed)
        if len(pool.nodes) == 1 and eligible(pool.nodes[0], demand):
            return pool.nodes[0]
        if not demand.digest:
            return self._least_busy(pool, demand, excluded)
        adapter = demand.adapter
        replicas = self._table.popularity.replicas(adapter)
        if replicas == 1:
            # what most requests find: the policy serves, and nothing speaks against it
            for node in pool.first(demand.policy, SHORT_LIST):
                if node.serves(deployed, adapter):
                    if self._simply(node, demand, excluded):
                        return node
                    break
        fitting = self._fitting(pool, demand, excluded, replicas)
        if len(fitting) == 1:
            return fitting[0]
        serving = [node for node in fitting if node.serves(deployed, adapter)]
        if serving:
            return self._among_copies(fitting, serving, demand, replicas, spread, [] if wanted is None else wanted)
        return self._for_a_load(fitting, demand, adapter)

    def _simply(self, node: Node, demand: Demand, excluded: Collection[str]) -> bool:
        return (
            not node.doubtful
            and node.name not in excluded
            and eligible(node, demand)
            and not self._bounds.spills(node, (demand.base, demand.fingerprint), demand.policy)
        )

    def _pool(self, deployed: Deployed) -> Pool:
        pool = Pool(deployed, self._table)
        before = self._pools.get(deployed)
        if before is not None and before.members == pool.members:
            # another base changed: what is remembered still holds
            before.version = pool.version
            return before
        self._pools[deployed] = pool
        return pool

    def _fitting(self, pool: Pool, demand: Demand, excluded: Collection[str], replicas: int) -> list[Node]:
        """The first nodes of the policy's order that can take it, more than ``replicas`` where there are; at least one.

        A policy is never looked for further along its order than this, so that its copies are found again.
        """
        wanted = SHORT_LIST if replicas < SHORT_LIST else replicas + SHORT_LIST
        listed = pool.first(demand.policy, wanted)
        found = _first(listed, demand, excluded, wanted)
        if len(found) <= replicas and len(listed) < len(pool.nodes):
            found = _first(pool.order(demand.policy), demand, excluded, wanted)
        return found or self._preferred(pool.order(demand.policy), demand, excluded)[:wanted]

    def _preferred(self, nodes: Iterable[Node], demand: Demand, excluded: Collection[str]) -> list[Node]:
        """The eligible nodes without those excluded or in doubt, or if that leaves none, with them."""
        fitting = [node for node in nodes if eligible(node, demand)]
        if not fitting:
            raise refusal(self._table, demand)
        return [node for node in fitting if not node.doubtful and node.name not in excluded] or fitting

    def _least_busy(self, pool: Pool, demand: Demand, excluded: Collection[str]) -> Node:
        """For base requests: the fewest leases an engine, by report or of this gateway, whichever knows of more.

        A base is on every node already, so that there is nothing gateways would have to agree on.
        """
        nodes = pool.nodes
        if len(nodes) > _LOOKED_AT:
            self._turn = begin = (self._turn + _LOOKED_AT) % len(nodes)
            some = nodes[begin : begin + _LOOKED_AT]
            some += nodes[: _LOOKED_AT - len(some)]
            nodes = tuple(_first(some, demand, excluded, _LOOKED_AT)) or nodes
        fitting = self._preferred(nodes, demand, excluded)
        deployed = demand.base, demand.fingerprint
        return min(fitting, key=lambda node: (node.busyness(deployed), node.name))

    def _among_copies(
        self,
        fitting: Sequence[Node],
        serving: list[Node],
        demand: Demand,
        replicas: int,
        spread: int,
        wanted: list[Node],
    ) -> Node:
        """One of the copies that serve. One more is wanted where the policy's load asks for it, or where all that there
        are have too much to do.
        """
        deployed, adapter = (demand.base, demand.fingerprint), demand.adapter
        others = [node for node in fitting if node not in serving]
        if replicas > len(serving):
            soon = fitting[:replicas]
            wanted += [node for node in others if node in soon and self._may_get_a_copy(node, demand, adapter)]
        copies = [node for node in serving if not self._bounds.spills(node, deployed, demand.policy)]
        if copies:
            del copies[replicas:]
            return copies[spread % len(copies)] if len(copies) > 1 else copies[0]
        if not wanted:
            wanted += [
                node
                for node in others
                if self._may_get_a_copy(node, demand, adapter)
                and not self._bounds.full(node, deployed, has_bytes=node.holds(demand.digest))
            ]
        return serving[0]

    def _may_get_a_copy(self, node: Node, demand: Demand, adapter: str) -> bool:
        """Whether a load for one copy more makes sense on ``node`` now: not a second one, nor one that must wait."""
        state = node.resident.get(demand.digest)
        deployment = node.deployment(demand.base, demand.fingerprint)
        return (
            deployment is not None
            and deployment.spare > 0
            and not node.loads_queued
            and adapter not in node.asked
            and state not in _COMING
            and state is not Residency.FAILED
        )

    def _for_a_load(self, fitting: Sequence[Node], demand: Demand, adapter: str) -> Node:
        """Where a revision that serves nowhere is to be loaded: where it is on its way, else where its bytes are, else
        on the first node in order that hasn't its share already. Where it failed lately only if it did everywhere.
        """
        deployed, digest = (demand.base, demand.fingerprint), demand.digest
        for node in fitting:
            if adapter in node.asked:
                return node
        hopeful = [node for node in fitting if node.resident.get(digest) is not Residency.FAILED] or fitting
        present = [node for node in hopeful if node.resident.get(digest) in _PRESENT]
        for has_bytes, nodes in ((True, present), (False, hopeful)):
            for node in nodes:
                if not self._bounds.full(node, deployed, has_bytes=has_bytes):
                    return node
        return min(hopeful, key=lambda node: self._bounds.crowding(node, deployed))


def _first(nodes: Iterable[Node], demand: Demand, excluded: Collection[str], count: int) -> list[Node]:
    """The first ``count`` nodes that can take ``demand`` and are neither excluded nor in doubt."""
    found: list[Node] = []
    for node in nodes:
        if not node.doubtful and node.name not in excluded and eligible(node, demand):
            found.append(node)
            if len(found) == count:
                break
    return found
