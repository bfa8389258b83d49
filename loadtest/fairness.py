"""One tenant floods a fleet with policies that nobody has asked for before, simulated: what do the others see of it?

The fleet runs at half of what its engines can compute, asked by tenants whose policies fit its slots; one of them is
the victim. Then the same arrivals come again, with the flood beside them: new policies of one tenant at twice the
rate at which they can be loaded. Ratios are of the victim's requests in both runs, which are the same requests.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from .page import Chart, Line, write_page
from .report import environment, percentile, write_report
from .simulate.catalog import MemoryCatalog
from .simulate.client import Ask, Client, Patience, Result
from .simulate.clock import simulate
from .simulate.constants import EngineConstants, read_constants
from .simulate.recorder import Recorder
from .simulate.world import Shape, World
from .traffic import Arrival, merged, policy_names, uniform

FLEET = Shape(nodes=2, slots=32, arena=64)
TENANTS, POLICIES_EACH, VICTIM = 4, 12, "tenant-0"
TOKENS, PROMPT = 16, 64
SHARE_OF_WORK, FLOOD_OVER_LOADS = 0.5, 2.0
# the flood is sent once and twice again where it is told to come back
_FLOOD_RETRIES = 2
_WARM_S = 10.0
_SETTLE_S = 40.0


def run(
    file: Path, *, small: bool, seed: int, plot: Path | None = None, say: Callable[[str], object] = lambda text: None
) -> dict[str, Any]:
    """Simulate and write the report; returns the summary."""
    constants, stand_in = read_constants()
    seconds, seeds = (20.0, 3) if small else (120.0, 9)
    pairs, charts, leaks = [], [], 0
    for place in range(seeds):
        say(f"seed {seed + place}")
        runs = []
        for flooded in (False, True):
            victims, recorder, left = simulate(
                lambda: beside_a_flood(constants, FLEET, seed + place, seconds, flooded=flooded)  # noqa: B023
            )
            runs.append(victims)
            leaks += len(left)
        pairs.append((runs[0], runs[1]))
        charts = recorder.charts()
    alone, beside = [[one.total_s for pair in pairs for one in pair[which]] for which in (0, 1)]
    ratios = [_p95(second) / _p95(first) for first, second in pairs]
    summary = {
        "victim_p95_over_alone": round(statistics.median(ratios), 3),
        "victim_p95_over_alone_worst": round(max(ratios), 3),
        "victim_first_token_p95_over_alone": round(
            percentile([one.first_s for pair in pairs for one in pair[1]], 0.95)
            / percentile([one.first_s for pair in pairs for one in pair[0]], 0.95),
            3,
        ),
        "victim_p95_alone_s": round(percentile(alone, 0.95), 3),
        "victim_requests": len(alone),
        "errors": sum(one.status != 200 or one.wrong for pair in pairs for half in pair for one in half),
        "leaks": leaks,
    }
    samples = {"alone_s": [round(one, 4) for one in alone], "flooded_s": [round(one, 4) for one in beside]}
    write_report(file, environment(seed=seed, engine="model", stand_in=stand_in), samples, summary)
    if plot is not None:
        latency = Chart(
            "The victim's time to the whole answer", "share of requests", "seconds",
            [Line.distribution("alone", alone), Line.distribution("beside the flood", beside)],
        )  # fmt: skip
        write_page(plot, "A flood of one tenant, and another's requests", summary, [latency, *charts], stand_in)
    return summary


async def beside_a_flood(
    constants: EngineConstants, shape: Shape, seed: int, seconds: float, *, flooded: bool
) -> tuple[list[Result], Recorder, list[str]]:
    """The victim's results, the course of the run, and what was left over."""
    world = World(shape, constants, seed=seed)
    catalog = cast(MemoryCatalog, world.catalog)
    ordinary = [name for tenant in range(TENANTS) for name in policy_names(POLICIES_EACH, f"tenant-{tenant}")]
    rate = SHARE_OF_WORK * requests_per_s(constants, shape.slots) * shape.nodes
    arrivals = uniform(ordinary, rate, _WARM_S + seconds, random.Random(seed))
    if flooded:
        flood_rate = FLOOD_OVER_LOADS * shape.nodes / (constants.install_s + constants.prepare_s + constants.step_s)
        count = int(flood_rate * seconds)
        flood = policy_names(count, "flood")
        ordinary += flood
        arrivals = merged(arrivals, [Arrival(_WARM_S + place / flood_rate, name) for place, name in enumerate(flood)])
    for name in ordinary:
        catalog.publish(name)
    await world.start()
    recorder = Recorder(world)
    asks = [Ask(one.at, one.model, TOKENS, PROMPT) for one in arrivals]
    patient, hasty = Client(world), Client(world, Patience(retries=_FLOOD_RETRIES))
    results, _ = await asyncio.gather(
        patient.run_open([ask for ask in asks if not ask.model.startswith("flood/")]),
        hasty.run_open([ask for ask in asks if ask.model.startswith("flood/")]),
    )
    recorder.stop()
    await asyncio.sleep(_SETTLE_S)
    victims = [one for one in results if one.asked.model.startswith(VICTIM + "/") and one.asked.at >= _WARM_S]
    return victims, recorder, world.leaks()


def requests_per_s(constants: EngineConstants, sequences: int) -> float:
    """What one engine answers a second with ``sequences`` of different adapters always running."""
    step_s = constants.step_s + sequences * (constants.sequence_s + constants.adapter_s)
    request_s = TOKENS * step_s + sequences * PROMPT * constants.prefill_s
    return sequences / request_s


def _p95(results: list[Result]) -> float:
    return percentile([one.total_s for one in results], 0.95)
