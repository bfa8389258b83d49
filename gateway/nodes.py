"""What the gateway knows of the fleet: each node's last full state with the deltas since. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Self

import msgspec

from wire.node import EngineReport, Health, NodeDelta, NodeReport, Residency

# states in which a revision's bytes are on the node, so that serving it needs no fetch
_HELD = frozenset({Residency.RESIDENT, Residency.INSTALLING, Residency.SERVING, Residency.DRAINING})

# plain numbers of a report that a delta may replace
_FIGURES = ("arena_used", "loads_in_flight", "loads_queued", "fetches", "installs", "rejected")


class Deployment(msgspec.Struct, frozen=True):
    """The engines of one node that run one base (same name and fingerprint), summed up for placement.

    ``max_rank`` and ``targets`` are the most that any of them takes, so that a node is passed over only where no
    engine fits; ``free_slots`` and ``outstanding`` (leases) count those that are ready.
    """

    base: str
    fingerprint: str
    ready: int
    max_rank: int
    targets: frozenset[str]
    free_slots: int
    outstanding: int
    serving: frozenset[str]

    @classmethod
    def of(cls, engines: Iterable[EngineReport]) -> Self:
        """Sum up ``engines``, of which there is at least one, all with the same base and fingerprint."""
        known = list(engines)
        ready = [engine for engine in known if engine.health is Health.READY]
        return cls(
            base=known[0].base,
            fingerprint=known[0].fingerprint,
            ready=len(ready),
            max_rank=max(engine.max_rank for engine in known),
            targets=frozenset().union(*(engine.targets for engine in known)),
            free_slots=sum(max(0, engine.slots - len(engine.serving)) for engine in ready),
            outstanding=sum(engine.outstanding for engine in ready),
            serving=frozenset().union(*(engine.serving for engine in ready)),
        )


class Node:
    """One node as reported. ``heard`` is false before its first report and while it is silent.

    ``reported`` stays true once it reported: a silent node still says what is deployed. ``doubtful`` means that its
    connection broke just now: it is taken only where there is no other.
    """

    def __init__(self, name: str) -> None:
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
        self.outstanding = 0
        self.leased = 0  # by this gateway, now: fresher than any report
        self._known = False
        self._deployments: dict[tuple[str, str], Deployment] = {}

    def deployment(self, base: str, fingerprint: str) -> Deployment | None:
        """The engines that run exactly this base, or None."""
        return self._deployments.get((base, fingerprint))

    def deployments(self) -> Iterable[Deployment]:
        return self._deployments.values()

    def holds(self, digest: str) -> bool:
        """Whether the revision's bytes are on the node."""
        return self.resident.get(digest) in _HELD

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
        for figure in _FIGURES:
            setattr(self, figure, getattr(report, figure))
        self._sum_up()

    def apply(self, delta: NodeDelta) -> None:
        """Take what changed. Before the first full state a delta means nothing and is left out."""
        if not self._known:
            return
        self.heard = True
        for digest, state in delta.residency.items():
            if state is Residency.ABSENT:
                self.resident.pop(digest, None)
            else:
                self.resident[digest] = state
        if delta.engines:
            self.engines.update((engine.engine, engine) for engine in delta.engines)
            self._sum_up()
        for figure in _FIGURES:
            if (value := getattr(delta, figure)) >= 0:
                setattr(self, figure, value)

    def doubt(self) -> None:
        """The connection broke: nothing that comes now can be relied on before a full state."""
        self.doubtful = True
        self._known = False

    def fall_silent(self) -> None:
        """Nothing was heard for too long: the node takes no work until a full state comes."""
        self.doubt()
        self.heard = False

    def _sum_up(self) -> None:
        groups: dict[tuple[str, str], list[EngineReport]] = {}
        for engine in self.engines.values():
            groups.setdefault((engine.base, engine.fingerprint), []).append(engine)
        self._deployments = {key: Deployment.of(engines) for key, engines in groups.items()}
        self.outstanding = sum(engine.outstanding for engine in self.engines.values())


class NodeTable:
    """The nodes of the fleet by name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._nodes = {name: Node(name) for name in names}
        self.all: tuple[Node, ...] = tuple(self._nodes.values())

    def __iter__(self) -> Iterator[Node]:
        return iter(self.all)

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    def ready_engines(self) -> int:
        """Engines that answer, on nodes that are heard."""
        return sum(deployment.ready for node in self.all if node.heard for deployment in node.deployments())
