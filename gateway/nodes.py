"""What the gateway knows of the fleet: each node's last full state with the deltas since. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from wire.node import EngineReport, Health, NodeDelta, NodeReport, Residency

from .deployments import NOTHING, Deployed, Deployment, Share, apportioned
from .popularity import Popularity

# states in which a revision's bytes are on the node, so that serving it needs no fetch
_HELD = frozenset({Residency.RESIDENT, Residency.INSTALLING, Residency.SERVING, Residency.DRAINING})

# plain numbers of a report that a delta may replace
_FIGURES = (
    "arena_used", "loads_in_flight", "loads_queued", "fetches", "installs", "rejected", "load_s", "load_rate",
    "loads_limit", "audit_findings", "given_bytes",
)  # fmt: skip


class Node:
    """One node as reported. ``heard`` is false before its first report and while it is silent.

    ``reported`` stays true once it reported: a silent node still says what is deployed. ``doubtful`` means that its
    connection broke just now: it is taken only where there is no other. Made by a ``NodeTable``.
    """

    def __init__(self, name: str, table: NodeTable) -> None:
        self.name = name
        self.heard = False
        self.reported = False
        self.doubtful = False
        self.draining = False
        self.epoch = 0
        self.engines: dict[str, EngineReport] = {}
        self.resident: dict[str, Residency] = {}
        self.base_names: frozenset[str] = frozenset()
        self.arena_bytes = 0
        self.arena_used = 0
        self.loads_in_flight = 0
        self.loads_queued = 0
        self.fetches = 0
        self.installs = 0
        self.rejected = 0
        self.load_s = 0.0
        self.load_rate = 0.0
        self.loads_limit = 0
        self.audit_findings = 0
        self.bytes_endpoint = ""
        self.arrived_bytes: dict[str, int] = {}
        self.given_bytes = 0
        self.peer_faults: dict[str, int] = {}
        self.queued_by_tenant: dict[str, int] = {}
        self.outstanding = 0
        self.leased = 0  # by this gateway, now: fresher than any report
        self.asked: Counter[str] = Counter()  # adapters that this gateway waits for here, likewise
        self._table = table
        self._known = False
        self._deployments: dict[Deployed, Deployment] = {}
        self._counted: dict[Deployed, Share] = {}

    def deployment(self, base: str, fingerprint: str) -> Deployment | None:
        """The engines that run exactly this base, or None."""
        return self._deployments.get((base, fingerprint))

    def deployments(self) -> Iterable[Deployment]:
        return self._deployments.values()

    def serves(self, deployed: Deployed, adapter: str) -> bool:
        """Whether a ready engine that runs this base has the adapter in a slot."""
        found = self._deployments.get(deployed)
        return found is not None and adapter in found.serving

    def holds(self, digest: str) -> bool:
        """Whether the revision's bytes are on the node."""
        return self.resident.get(digest) in _HELD

    def busyness(self, deployed: Deployed) -> float:
        """Leases an engine that runs this base, by report or of this gateway, whichever knows of more."""
        share = self._counted.get(deployed)
        leases = self.leased if self.leased > self.outstanding else self.outstanding
        return leases / share.ready if share is not None and share.ready else float(leases)

    def share(self, deployed: Deployed) -> Share:
        """What it has of a base's totals; nothing while it takes no work."""
        return self._counted.get(deployed, NOTHING)

    def replace(self, report: NodeReport) -> None:
        """Take a full state."""
        self.heard = self.reported = self._known = True
        self.doubtful = False
        self.epoch = report.epoch
        self.draining = report.draining
        self.engines = {engine.engine: engine for engine in report.engines}
        self.resident = dict(report.resident)
        self.base_names = frozenset(report.base_names) | {engine.base for engine in report.engines}
        self.arena_bytes = report.arena_bytes
        self.queued_by_tenant = report.queued_by_tenant
        self.bytes_endpoint = report.bytes_endpoint
        self.arrived_bytes = report.arrived_bytes
        self.peer_faults = report.peer_faults
        for figure in _FIGURES:
            setattr(self, figure, getattr(report, figure))
        self._sum_up()
        self._recount()
        self._tell_leases()

    def apply(self, delta: NodeDelta) -> None:
        """Take what changed. Before the first full state a delta means nothing and is left out."""
        if not self._known:
            return
        work = self.heard, self.draining, self.loads_in_flight + self.loads_queued
        self.heard = True
        for digest, state in delta.residency.items():
            if state is Residency.ABSENT:
                self.resident.pop(digest, None)
            else:
                self.resident[digest] = state
        if delta.engines:
            self.engines.update((engine.engine, engine) for engine in delta.engines)
            self._sum_up()
        if delta.draining is not None:
            self.draining = delta.draining
        if delta.queued_by_tenant is not None:
            self.queued_by_tenant = delta.queued_by_tenant
        if delta.arrived_bytes is not None:
            self.arrived_bytes = delta.arrived_bytes
        if delta.peer_faults is not None:
            self.peer_faults = delta.peer_faults
        for figure in _FIGURES:
            if (value := getattr(delta, figure)) >= 0:
                setattr(self, figure, value)
        if delta.engines or work != (self.heard, self.draining, self.loads_in_flight + self.loads_queued):
            self._recount()
        if delta.engines:
            self._tell_leases()

    def doubt(self) -> None:
        """The connection broke: nothing that comes now can be relied on before a full state."""
        self.doubtful = True
        self._known = False

    def fall_silent(self) -> None:
        """Nothing was heard for too long: the node takes no work until a full state comes."""
        self.doubt()
        self.heard = False
        self._recount()
        self._tell_leases()

    def leave(self) -> None:
        """It is no part of the fleet any more: it takes no work, whatever it still reports."""
        self.fall_silent()
        self.reported = False
        self._deployments = {}

    def _sum_up(self) -> None:
        groups: dict[Deployed, list[EngineReport]] = {}
        for engine in self.engines.values():
            groups.setdefault((engine.base, engine.fingerprint), []).append(engine)
        before = self._deployments
        self._deployments = {key: Deployment.of(engines) for key, engines in groups.items()}
        self.outstanding = sum(engine.outstanding for engine in self.engines.values())
        if _weights(before) != _weights(self._deployments):
            self._table.version += 1

    def _recount(self) -> None:
        """Bring the table's totals up to this node's state."""
        loads = self.loads_in_flight + self.loads_queued
        takes_work = self.heard and not self.draining
        working = {key: found for key, found in self._deployments.items() if takes_work and found.ready}
        dealt = apportioned(loads, working)
        shares = {
            key: Share(found.ready, found.slots, found.outstanding, len(found.serving) + dealt[key])
            for key, found in working.items()
        }
        self._table.recount(self._counted, shares)
        self._counted = shares

    def _tell_leases(self) -> None:
        """Have it known which adapters are busy here."""
        popularity = self._table.popularity
        busy: dict[str, int] = {}
        for engine in self.engines.values() if self.heard else ():
            # most engines have none that is busy enough to matter
            if engine.leases and engine.health is Health.READY and max(engine.leases) >= popularity.floor:
                for adapter, count in zip(engine.serving, engine.leases, strict=False):
                    if count >= popularity.floor:
                        busy[adapter] = busy.get(adapter, 0) + count
        popularity.observe(self.name, busy)


def _weights(deployments: dict[Deployed, Deployment]) -> dict[Deployed, int]:
    return {key: deployment.weight for key, deployment in deployments.items()}


class NodeTable:
    """The nodes of the fleet by name, what they have in total, and how much each policy is asked.

    ``version`` changes when a node comes or goes, or runs another base or a base on more or fewer slots. ``clock``
    gives seconds.
    """

    def __init__(
        self,
        names: Iterable[str] = (),
        *,
        popularity: Popularity | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.popularity = Popularity(clock) if popularity is None else popularity
        self.version = 0
        self._nodes: dict[str, Node] = {}
        self._totals: dict[Deployed, Share] = {}
        self.all: tuple[Node, ...] = ()
        for name in names:
            self.add(name)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    def get(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def make(self, name: str) -> Node:
        """A node that may join: it is none of these before ``put``."""
        return Node(name, self)

    def put(self, node: Node) -> None:
        """A node joins; it takes work once it has reported. Raises KeyError for a name that is there."""
        if node.name in self._nodes:
            raise KeyError(node.name)
        self._nodes[node.name] = node
        self._listed()

    def add(self, name: str) -> Node:
        """Make a node that joins. Raises KeyError for a name that is there."""
        node = self.make(name)
        self.put(node)
        return node

    def remove(self, name: str) -> Node:
        """A node that leaves: nothing is placed on it from now on. Raises KeyError."""
        node = self._nodes.pop(name)
        node.leave()
        self._listed()
        return node

    def totals(self, deployed: Deployed) -> Share:
        """What all nodes that take work have of a base."""
        return self._totals.get(deployed, NOTHING)

    def recount(self, before: dict[Deployed, Share], after: dict[Deployed, Share]) -> None:
        """A node's part in the totals changed."""
        for times, shares in ((-1, before), (1, after)):
            for key, share in shares.items():
                self._totals.setdefault(key, Share()).add(share, times)

    def ready_engines(self) -> int:
        """Engines that answer, on nodes that are heard."""
        return sum(deployment.ready for node in self.all if node.heard for deployment in node.deployments())

    def _listed(self) -> None:
        self.all = tuple(self._nodes.values())
        self.version += 1
