"""MinT's stress shape, simulated: 2048 policies at concurrency 230 on two nodes of 32 slots with small arenas.

Clients honour Retry-After, so that everything completes. The baseline in the same run is what that system's release
had in front of its engines: two replicas behind a hash of the policy, one load in flight and one queued on each. It
runs on the same sidecar code, engine model and clients, so that the ratio is that of routing and admission alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import statistics
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

from gateway.nodes import Node, NodeTable
from gateway.placement import Demand, Placer

from .page import Chart, Line, write_page
from .report import environment, percentile, write_report
from .simulate.catalog import MemoryCatalog
from .simulate.client import Ask, Client, Result
from .simulate.clock import simulate
from .simulate.constants import EngineConstants, read_constants
from .simulate.recorder import Recorder
from .simulate.world import Shape, World
from .traffic import policy_names

POLICIES, CONCURRENCY, NODES, SLOTS, ARENA = 2048, 230, 2, 32, 64
PROMPT, TOKENS = 64, 16
TENANTS = 8
# the settings that a sidecar has by itself
OURS = Shape(nodes=NODES, slots=SLOTS, arena=ARENA)
STICKY = Shape(nodes=NODES, slots=SLOTS, arena=ARENA, settings={"loads_in_flight": 1, "loads_queued": 1})
# until leases that were lost on the way would have ended, and books been compared
_SETTLE_S = 40.0


class StickyPlacer:
    """A hash of the policy chooses, whatever the nodes report; there is no second choice."""

    def __init__(self, table: NodeTable) -> None:
        self._table = table

    def place(self, demand: Demand, *, excluded: Collection[str] = (), **_: Any) -> Node:
        nodes = sorted(self._table, key=lambda node: node.name)
        word = hashlib.blake2b((demand.policy or demand.base).encode(), digest_size=8).digest()
        return nodes[int.from_bytes(word, "little") % len(nodes)]


class Outcome:
    """One run: its results, what was left over, and the course of it."""

    def __init__(self, results: list[Result], leaks: list[str], recorder: Recorder) -> None:
        self.results = results
        self.leaks = leaks
        self.recorder = recorder

    @property
    def p95_s(self) -> float:
        return percentile([one.total_s for one in self.results if one.status == 200], 0.95)

    @property
    def errors(self) -> int:
        """Everything but an answer: a request that was told to come back came back."""
        return sum(one.status != 200 or one.wrong for one in self.results)

    def promises(self) -> list[float]:
        """How far each Retry-After was from the truth, as a factor of 1 or more."""
        ratios = [told.true_s / told.said_s for one in self.results for told in one.refusals]
        return [max(ratio, 1 / ratio) for ratio in ratios]


def run(
    file: Path, *, small: bool, seed: int, plot: Path | None = None, say: Callable[[str], object] = lambda text: None
) -> dict[str, Any]:
    """Simulate and write the report; returns the summary."""
    constants, stand_in = read_constants()
    seeds = [seed] if small else [seed + place for place in range(5)]
    pairs = []
    for one in seeds:
        say(f"seed {one}")
        ours = simulate(lambda: stress(constants, OURS, one, Placer))  # noqa: B023
        sticky = simulate(lambda: stress(constants, STICKY, one, sticky_placer))  # noqa: B023
        pairs.append((ours, sticky))
    summary = _summary(pairs)
    samples = {
        "ours_total_s": [round(one.total_s, 4) for ours, _ in pairs for one in ours.results],
        "sticky_total_s": [round(one.total_s, 4) for _, sticky in pairs for one in sticky.results],
        "leaks": [leak for pair in pairs for run_ in pair for leak in run_.leaks],
    }
    write_report(file, environment(seed=seed, engine="model", stand_in=stand_in), samples, summary)
    if plot is not None:
        ours, sticky = pairs[0]
        _draw(plot, ours, sticky, summary, stand_in)
    return summary


def sticky_placer(table: NodeTable) -> Placer:
    return cast(Placer, StickyPlacer(table))


async def stress(
    constants: EngineConstants, shape: Shape, seed: int, make_placer: Callable[[NodeTable], Placer],
    *, policies: int = POLICIES, concurrency: int = CONCURRENCY,
) -> Outcome:  # fmt: skip
    """Every policy once, in random order, ``concurrency`` at any time."""
    world = World(shape, constants, seed=seed, make_placer=make_placer)
    names = [
        f"tenant-{number % TENANTS}/{name.partition('/')[2]}" for number, name in enumerate(policy_names(policies))
    ]
    for name in names:
        cast(MemoryCatalog, world.catalog).publish(name)
    random.Random(seed).shuffle(names)
    await world.start()
    recorder = Recorder(world)
    results = await Client(world).run_closed([Ask(0.0, name, TOKENS, PROMPT) for name in names], concurrency)
    recorder.stop()
    await asyncio.sleep(_SETTLE_S)
    return Outcome(results, world.leaks(), recorder)


def _summary(pairs: list[tuple[Outcome, Outcome]]) -> dict[str, Any]:
    promises = [factor for ours, _ in pairs for factor in ours.promises()]
    found: dict[str, Any] = {
        "errors": sum(ours.errors for ours, _ in pairs),
        "p95_over_sticky": round(statistics.median(ours.p95_s / sticky.p95_s for ours, sticky in pairs), 3),
        "completed": sum(one.status == 200 for ours, _ in pairs for one in ours.results),
        "p95_s": round(statistics.median(ours.p95_s for ours, _ in pairs), 3),
        "sticky_p95_s": round(statistics.median(sticky.p95_s for _, sticky in pairs), 3),
        "sticky_errors": sum(sticky.errors for _, sticky in pairs),
        "refusals": len(promises),
        "sticky_refusals": sum(len(one.refusals) for _, sticky in pairs for one in sticky.results),
        "leaks": sum(len(ours.leaks) for ours, _ in pairs),
    }
    if promises:
        found["retry_after_ratio_p95"] = round(percentile(promises, 0.95), 3)
    return found


def _draw(file: Path, ours: Outcome, sticky: Outcome, summary: dict[str, Any], stand_in: dict[str, Any]) -> None:
    latency = Chart(
        "Time to the whole answer", "share of requests", "seconds",
        [Line.distribution("placement and admission", [one.total_s for one in ours.results]),
         Line.distribution("sticky hash, 1 + 1 loads", [one.total_s for one in sticky.results])],
    )  # fmt: skip
    write_page(file, "Two nodes under MinT's stress shape", summary, [latency, *ours.recorder.charts()], stand_in)
