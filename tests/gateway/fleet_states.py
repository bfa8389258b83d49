"""Node reports for tests that need no sockets."""

from __future__ import annotations

from gateway.nodes import NodeTable
from gateway.placement import Demand
from wire.node import EngineReport, Health, NodeReport, Residency

BASE = "tiny"
FINGERPRINT = "f" * 64
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


def digest_of(number: int) -> str:
    return f"{number:064x}"


def demand(name: str = "acme/bot", number: int = 1, *, rank: int = 8, targets: tuple[str, ...] = ("q", "v")) -> Demand:
    """A demand for the revision with digest ``number`` of the policy ``name``."""
    return Demand(
        base=BASE,
        fingerprint=FINGERPRINT,
        policy=name,
        tenant=name.partition("/")[0],
        digest=digest_of(number),
        rank=rank,
        targets=targets,
    )


def base_demand() -> Demand:
    return Demand(base=BASE, fingerprint=FINGERPRINT)


def engine(
    name: str = "e0",
    *,
    backend: str = "vllm",
    base: str = BASE,
    fingerprint: str = FINGERPRINT,
    health: Health = Health.READY,
    slots: int = 4,
    max_rank: int = 16,
    targets: tuple[str, ...] = TARGETS,
    serving: tuple[str, ...] = (),
    outstanding: int = 0,
    leases: tuple[int, ...] = (),
) -> EngineReport:
    return EngineReport(
        engine=name,
        backend=backend,
        base=base,
        fingerprint=fingerprint,
        health=health,
        slots=slots,
        max_rank=max_rank,
        targets=targets,
        serving=serving,
        outstanding=outstanding,
        leases=leases,
    )


def report(
    node: str,
    *engines: EngineReport,
    resident: dict[str, Residency] | None = None,
    draining: bool = False,
    epoch: int = 1,
) -> NodeReport:
    return NodeReport(
        node=node,
        endpoint=f"ipc://{node}",
        epoch=epoch,
        engines=engines or (engine(),),
        resident=resident or {},
        arena_bytes=1 << 20,
        arena_used=0,
        draining=draining,
    )


def table(*reports: NodeReport) -> NodeTable:
    """A table in which every node has reported."""
    nodes = NodeTable(state.node for state in reports)
    for state in reports:
        nodes[state.node].replace(state)
    return nodes
