"""What a placement costs, and how many policies a node moves that joins or leaves.

The gateway's own node table and placement, given reports as sidecars write them; nothing is served.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.nodes import NodeTable
from gateway.placement import Demand, Placer
from gateway.placement.rendezvous import Rendezvous
from wire.node import EngineReport, Health, NodeReport

from .report import environment, percentile, write_report

BASE, FINGERPRINT = "bench", "0" * 64
SLOTS = 64
_STAND_IN = {"nodes": "reports made here: one engine each, of 64 slots, every fourth of 32; three quarters in use"}


class Fleet:
    """Nodes by what they serve; each says so whenever that changes, as a sidecar does."""

    def __init__(self, nodes: int) -> None:
        self.table = NodeTable()
        self.slots = {f"node-{number}": SLOTS // 2 if number % 4 == 3 else SLOTS for number in range(nodes)}
        self.serving: dict[str, list[str]] = {name: [] for name in self.slots}
        self.outstanding = dict.fromkeys(self.slots, 0)
        for name in self.slots:
            self.table.add(name)
            self.report(name)
        self.placer = Placer(self.table)

    def report(self, name: str) -> None:
        """The node's full state reaches the gateway."""
        engine = EngineReport(
            engine=f"{name}-0", backend="vllm", base=BASE, fingerprint=FINGERPRINT, health=Health.READY,
            slots=self.slots[name], max_rank=64, serving=tuple(self.serving[name]),
            outstanding=self.outstanding[name],
        )  # fmt: skip
        self.table[name].replace(
            NodeReport(
                node=name, endpoint="", epoch=1, engines=(engine,), resident={}, arena_bytes=0, arena_used=0
            )
        )  # fmt: skip

    def ask(self, demand: Demand) -> str:
        """Place one request; its node serves the policy from then on."""
        name = self.placer.place(demand).name
        if demand.adapter not in self.serving[name]:
            self.serving[name].append(demand.adapter)
            self.report(name)
        return name

    def fill(self, demands: Sequence[Demand]) -> dict[str, str]:
        """Where each of ``demands`` is."""
        return {demand.policy: self.ask(demand) for demand in demands}

    @property
    def room(self) -> int:
        return sum(self.slots.values()) * 3 // 4


def run(file: Path, *, small: bool, seed: int) -> dict[str, Any]:
    """Measure and write the report; returns the summary."""
    rounds, policies, changes = (5, 20_000, 20) if small else (15, 50_000, 60)
    samples: dict[str, Any] = {}
    for nodes in (40, 1000):
        samples[f"decide_{nodes}_nodes"] = _costs(nodes, rounds, seed)
        samples[f"orders_{nodes}_nodes"] = _moved_in_order(nodes, policies, changes, seed)
    samples["living_40_nodes"] = _moved_in_a_living_fleet(40, seed)
    summary = _summary(samples)
    write_report(file, environment(seed=seed, engine="none", stand_in=_STAND_IN), samples, summary)
    return summary


def _summary(samples: dict[str, Any]) -> dict[str, Any]:
    """A decision costs what the dearest kind of it does; movement is the most that any change made."""
    dearest = {
        f"decide_{nodes}_nodes_us": round(
            max(percentile(of, 0.5) for of in samples[f"decide_{nodes}_nodes"].values()), 2
        )
        for nodes in (40, 1000)
    }
    moved = max(
        ratio
        for name in ("orders_40_nodes", "orders_1000_nodes", "living_40_nodes")
        for ratio in samples[name].values()
    )
    return {**dearest, "moved_over_minimum": round(moved, 3)}


def _demands(count: int, seed: int) -> list[Demand]:
    chance = random.Random(seed)
    return [
        Demand(
            base=BASE, fingerprint=FINGERPRINT, policy=f"tenant{number % 97}/p{number}", tenant=f"tenant{number % 97}",
            digest=f"{chance.getrandbits(256):064x}", rank=16,
        )
        for number in range(count)
    ]  # fmt: skip


def _costs(nodes: int, rounds: int, seed: int) -> dict[str, list[float]]:
    """Microseconds of processor time for one decision, by kind; one mean over many decisions for each round."""
    costs: dict[str, list[float]] = {}
    for number in range(rounds):
        fleet = Fleet(nodes)
        fleet.fill(served := _demands(fleet.room, seed + number))
        fresh = _demands(2000, seed + 1000 + number)
        base = [Demand(base=BASE, fingerprint=FINGERPRINT)] * 2000
        chosen = random.Random(seed + number).sample(served, min(2000, len(served)))
        kinds = {"serving": chosen, "new_policy": fresh, "cold_again": fresh, "base": base}
        for kind, demands in kinds.items():
            costs.setdefault(kind, []).append(_mean_us(fleet.placer, demands))
        _overload(fleet)
        costs.setdefault("overloaded", []).append(_mean_us(fleet.placer, chosen))
    return costs


def _mean_us(placer: Placer, demands: Sequence[Demand]) -> float:
    gc.collect()
    begun = time.thread_time()
    for demand in demands:
        placer.place(demand)
    return (time.thread_time() - begun) / len(demands) * 1e6


def _overload(fleet: Fleet) -> None:
    """Half of the nodes have far more requests than the others."""
    for number, name in enumerate(fleet.slots):
        fleet.outstanding[name] = 400 if number % 2 else 10
        fleet.report(name)


def _moved_in_order(nodes: int, policies: int, changes: int, seed: int) -> dict[str, float]:
    """Policies whose first node is another after a node joined (or, read backwards, left), over that node's share."""
    names = [f"tenant{number % 97}/p{seed}-{number}" for number in range(policies)]
    weights = {f"node-{number}": 1.0 if number % 4 else 0.5 for number in range(nodes)}
    before = Rendezvous(weights, weights)
    first = [before.order(name, 1)[0] for name in names]
    moved, least, elsewhere = 0, 0.0, 0
    for change in range(changes):
        new = f"new-{seed}-{change}"
        more = {**weights, new: 1.0}
        after = Rendezvous(more, more)
        now = [after.order(name, 1)[0] for name in names]
        moved += sum(one != other for one, other in zip(first, now, strict=True))
        elsewhere += sum(one != other and other != new for one, other in zip(first, now, strict=True))
        least += policies / sum(more.values())
    return {"joins": moved / least, "moved_between_others": 1.0 + elsewhere / least}


def _moved_in_a_living_fleet(nodes: int, seed: int) -> dict[str, float]:
    """Three quarters of the slots serve. A node leaves, and one joins: policies that move, over those that must."""
    fleet = Fleet(nodes)
    demands = _demands(fleet.room, seed)
    before = fleet.fill(demands)
    gone = "node-0"
    fleet.table.remove(gone)
    del fleet.slots[gone]
    after = fleet.fill(demands)
    must = sum(name == gone for name in before.values())
    leaves = sum(before[policy] != after[policy] for policy in before) / must
    fleet.table.add("new")
    fleet.slots["new"], fleet.serving["new"], fleet.outstanding["new"] = SLOTS, [], 0
    fleet.report("new")
    joined = fleet.fill(demands)
    share = len(demands) * SLOTS / sum(fleet.slots.values())
    return {"leaves": leaves, "joins": sum(after[policy] != joined[policy] for policy in after) / share}
