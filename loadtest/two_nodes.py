"""MinT's stress shape, simulated: 2048 policies at concurrency 230 on two nodes of 32 slots with small arenas.

Clients honour Retry-After, so that everything completes. The baseline in the same run is what that system is published
to have in front of its engines: two replicas behind a hash of the policy, one load in flight and one queued on each,
and everybody else refused, to try again a second later. It runs on the same engine model, clients and sidecar code
(whose own admission it never reaches), so that the ratio is that of routing and admission alone. Ours comes once as
nodes are set by default, and once with a queue so short that Retry-After is told often enough to be compared with the
truth.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import statistics
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

from catalog.names import adapter_name
from gateway.nodes import Node, NodeTable
from gateway.placement import Demand, Placer
from sidecar.machine import Machine
from wire.node import Acquire, Refused
from wire.outcomes import Outcome

from .page import Chart, Line, write_page
from .report import environment, percentile, spread, write_report
from .simulate.catalog import MemoryCatalog
from .simulate.client import Ask, Client, Result
from .simulate.clock import simulate
from .simulate.constants import MEASURED, EngineConstants, read_constants
from .simulate.recorder import Recorder
from .simulate.world import Shape, World
from .traffic import policy_names

POLICIES, CONCURRENCY, NODES, SLOTS, ARENA = 2048, 230, 2, 32, 64
PROMPT, TOKENS = 64, 16
TENANTS = 8
OURS = Shape(nodes=NODES, slots=SLOTS, arena=ARENA)
# the same with so short a queue that many are told when to come back
SHORT_QUEUE = Shape(
    nodes=NODES, slots=SLOTS, arena=ARENA,
    settings={"loads_queued": 64, "loads_queued_per_tenant": 48, "loads_queued_s": 0.0},
)  # fmt: skip
# what is ours of admission does not slow it down
STICKY = Shape(
    nodes=NODES, slots=SLOTS, arena=ARENA,
    settings={"loads_in_flight": 1, "tenant_loads_per_s": 1e6, "tenant_loads_share": 1e6},
)  # fmt: skip
_MOST_LOADS, _PAUSE_S = 2, 1.0
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


def one_and_one(machine: Machine, ask: Acquire) -> Refused | None:
    """The baseline's admission: past one load in flight and one queued, no other is waited for."""
    state = machine.state
    adapter = adapter_name(ask.tenant, ask.digest)
    serving = any(engine.serving(adapter) for engine in state.engines.values())
    if not ask.digest or serving or state.queue.get((ask.base, adapter)) is not None:
        return None
    if sum(1 for _ in state.queue) < _MOST_LOADS:
        return None
    return Refused(
        lease=ask.lease, outcome=Outcome.COLD_LOAD_BOUND, message="a load is in flight and one waits",
        retry_after_s=_PAUSE_S,
    )  # fmt: skip


class Stressed:
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
    file: Path, *, small: bool, seed: int, engine: Path = MEASURED, plot: Path | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Simulate and write the report; returns the summary."""
    constants, stand_in = read_constants(engine)
    seeds = [seed + place for place in range(3 if small else 9)]
    pairs, short = [], []
    for one in seeds:
        say(f"seed {one}")
        ours = simulate(lambda: stress(constants, OURS, one))  # noqa: B023
        sticky = simulate(lambda: stress(constants, STICKY, one, sticky=True))  # noqa: B023
        pairs.append((ours, sticky))
        short.append(simulate(lambda: stress(constants, SHORT_QUEUE, one)))  # noqa: B023
    summary = _summary(pairs, short)
    samples = {
        "p95_s": [[round(one.p95_s, 4) for one in pair] for pair in pairs],
        "ours_total_spread_s": spread([round(one.total_s, 4) for ours, _ in pairs for one in ours.results]),
        "sticky_total_spread_s": spread([round(one.total_s, 4) for _, sticky in pairs for one in sticky.results]),
        "short_queue_total_spread_s": spread([round(one.total_s, 4) for found in short for one in found.results]),
        "leaks": [leak for pair in [*pairs, short] for found in pair for leak in found.leaks],
    }
    write_report(file, environment(seed=seed, engine="model", stand_in=stand_in), samples, summary)
    if plot is not None:
        ours, sticky = pairs[0]
        _draw(plot, ours, sticky, summary, stand_in)
    return summary


def sticky_placer(table: NodeTable) -> Placer:
    return cast(Placer, StickyPlacer(table))


async def stress(
    constants: EngineConstants, shape: Shape, seed: int, *, sticky: bool = False, policies: int = POLICIES,
    concurrency: int = CONCURRENCY,
) -> Stressed:  # fmt: skip
    """Every policy once, in random order, ``concurrency`` at any time, on nodes whose slots are full already."""
    world = World(
        shape, constants, seed=seed, make_placer=sticky_placer if sticky else Placer,
        refuse=one_and_one if sticky else None,
    )  # fmt: skip
    names = [
        f"tenant-{number % TENANTS}/{name.partition('/')[2]}" for number, name in enumerate(policy_names(policies))
    ]
    former = policy_names(2 * shape.nodes * shape.slots, "former")
    for name in [*names, *former]:
        cast(MemoryCatalog, world.catalog).publish(name)
    random.Random(seed).shuffle(names)
    await world.start()
    await Client(world).run_closed(_asks(former), shape.slots)
    recorder = Recorder(world)
    results = await Client(world).run_closed(_asks(names), concurrency)
    recorder.stop()
    await asyncio.sleep(_SETTLE_S)
    return Stressed(results, world.leaks(), recorder)


def _asks(names: list[str]) -> list[Ask]:
    return [Ask(0.0, name, TOKENS, PROMPT) for name in names]


def _summary(pairs: list[tuple[Stressed, Stressed]], short: list[Stressed]) -> dict[str, Any]:
    promises = [factor for found in short for factor in found.promises()]
    found: dict[str, Any] = {
        "errors": sum(ours.errors for ours, _ in pairs),
        "p95_over_sticky": round(statistics.median(ours.p95_s / sticky.p95_s for ours, sticky in pairs), 3),
        "completed": sum(one.status == 200 for ours, _ in pairs for one in ours.results),
        "p95_s": round(statistics.median(ours.p95_s for ours, _ in pairs), 3),
        "sticky_p95_s": round(statistics.median(sticky.p95_s for _, sticky in pairs), 3),
        "sticky_errors": sum(sticky.errors for _, sticky in pairs),
        "refusals": sum(len(one.refusals) for ours, _ in pairs for one in ours.results),
        "sticky_refusals": sum(len(one.refusals) for _, sticky in pairs for one in sticky.results),
        "short_queue_errors": sum(found.errors for found in short),
        "short_queue_completed": sum(one.status == 200 for found in short for one in found.results),
        "short_queue_p95_s": round(statistics.median(found.p95_s for found in short), 3),
        "short_queue_refusals": len(promises),
        "leaks": sum(len(found.leaks) for found in [*(ours for ours, _ in pairs), *short]),
    }
    if promises:
        found["retry_after_ratio_p95"] = round(percentile(promises, 0.95), 3)
    return found


def _draw(file: Path, ours: Stressed, sticky: Stressed, summary: dict[str, Any], stand_in: dict[str, Any]) -> None:
    latency = Chart(
        "Time to the whole answer", "share of requests", "seconds",
        [Line.distribution("placement and admission", [one.total_s for one in ours.results]),
         Line.distribution("sticky hash, 1 + 1 loads", [one.total_s for one in sticky.results])],
    )  # fmt: skip
    write_page(file, "Two nodes under MinT's stress shape", summary, [latency, *ours.recorder.charts()], stand_in)
