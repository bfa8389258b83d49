"""A wave over a fleet, simulated: a million policies, 2,300 of them asked for five times each in random order.

44 nodes of 64 slots have a fifth more slots than there are policies in the wave. Each policy should be loaded once, on
one node, and no node should do much more than the others. The catalog is a real one, read as gateways read it.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from catalog.names import parse_reference
from catalog.view import CatalogView

from .catalog.filled import BASE, FINGERPRINT, fill, policy_name
from .page import Chart, Line, write_page
from .report import environment, percentile, spread, write_report
from .simulate.catalog import OpenCatalog
from .simulate.client import Ask, Client, Result
from .simulate.clock import simulate
from .simulate.constants import MEASURED, EngineConstants, read_constants
from .simulate.recorder import Recorder
from .simulate.world import Shape, World
from .traffic import rounds_in_random_order

CATALOG, DISTINCT, ROUNDS, SECONDS = 1_000_000, 2_300, 5, 120.0
FLEET = Shape(nodes=44, slots=64, gateways=2, arena=96)
_SETTLE_S = 40.0


class Wave(msgspec.Struct):
    """What one wave came to. ``fetched_bytes`` by all nodes, ``distinct_bytes`` of what was asked for."""

    results: list[Result]
    fetched_bytes: int
    distinct_bytes: int
    nodes: list[str]
    leaks: list[str]
    charts: list[Chart]

    def busiest_over_mean(self) -> float:
        counts = Counter(one.node for one in self.results if one.status == 200)
        return max(counts.values()) / (sum(counts.values()) / len(self.nodes))


def run(
    file: Path, *, small: bool, seed: int, engine: Path = MEASURED, plot: Path | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Simulate and write the report; returns the summary. ``small`` is one wave, else three of different seeds."""
    constants, stand_in = read_constants(engine)
    waves = []
    with tempfile.TemporaryDirectory(prefix="roost-loadtest-") as scratch:
        say(f"filling a catalog of {CATALOG:,} policies")
        with closing(CatalogView.open(fill(Path(scratch) / "catalog", CATALOG, 1))) as view:
            for place in range(1 if small else 3):
                say(f"seed {seed + place}")
                waves.append(simulate(lambda: wave(constants, FLEET, view, seed + place)))  # noqa: B023
    results = [one for each in waves for one in each.results]
    served = [one.total_s for one in results if one.status == 200]
    summary = {
        "distinct": len({one.asked.model for one in results}),
        "served": len(served),
        "asked": len(results),
        "bytes_over_distinct": round(max(each.fetched_bytes / each.distinct_bytes for each in waves), 4),
        "busiest_over_mean": round(max(each.busiest_over_mean() for each in waves), 4),
        "wrong_answers": sum(one.wrong for one in results),
        "total_p95_s": round(percentile(served, 0.95), 3),
        "leaks": sum(len(each.leaks) for each in waves),
    }
    by_node = [dict(sorted(Counter(one.node for one in each.results).items())) for each in waves]
    samples = {"total_spread_s": spread([round(one, 4) for one in served]), "served_by_node": by_node}
    write_report(file, environment(seed=seed, engine="model", stand_in=stand_in), samples, summary)
    if plot is not None:
        counts = sorted(by_node[0].values())
        nodes = Chart(
            "Requests by node, the least busy first", "requests", "nodes",
            [Line("requests", [float(place + 1) for place in range(len(counts))], [float(count) for count in counts])],
        )  # fmt: skip
        latency = Chart("Time to the whole answer", "share of requests", "seconds", [Line.distribution("", served)])
        write_page(
            plot, "A wave of 2,300 policies over 44 nodes", summary, [latency, nodes, *waves[0].charts], stand_in
        )
    return summary


async def wave(
    constants: EngineConstants, shape: Shape, view: CatalogView, seed: int, *, catalog: int = CATALOG,
    distinct: int = DISTINCT, seconds: float = SECONDS,
) -> Wave:  # fmt: skip
    """One wave over a fleet that holds nothing yet."""
    chance = random.Random(seed)
    names = [policy_name(number) for number in chance.sample(range(catalog), distinct)]
    sizes = {name: view.resolve(parse_reference(name)).size for name in names}
    world = World(
        shape, constants, seed=seed, catalog=OpenCatalog(view), base=(BASE, FINGERPRINT), largest=max(sizes.values())
    )
    await world.start()
    recorder = Recorder(world)
    arrivals = rounds_in_random_order(names, ROUNDS, seconds, chance)
    results = await Client(world).run_open([Ask(one.at, one.model) for one in arrivals])
    recorder.stop()
    await asyncio.sleep(_SETTLE_S)
    return Wave(
        results, world.store.fetched_bytes, sum(sizes.values()), [node.name for node in world.nodes], world.leaks(),
        recorder.charts(),
    )  # fmt: skip
