"""One tenant floods a fleet with policies that nobody has asked for before, simulated: what do the others see of it?

Ordinary tenants, the victim among them, ask at half of the rate that the engines can compute, for policies that fit
their share of the slots. The same arrivals come three times: beside nobody (``alone``); beside the flood, new policies
at twice the rate at which they can be loaded; and, to compare with, beside a crowd, well-behaved neighbours whose
loaded policies keep every other slot computing.
"""

from __future__ import annotations

import asyncio
import enum
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
from .simulate.constants import MEASURED, EngineConstants, read_constants
from .simulate.recorder import Recorder
from .simulate.world import Shape, World
from .traffic import policy_names, uniform

FLEET = Shape(nodes=2, slots=32, arena=64)
TENANTS, POLICIES_EACH, VICTIM = 4, 8, "tenant-0"
TOKENS, PROMPT = 16, 64
SHARE_OF_WORK, FLOOD_OVER_LOADS = 0.5, 2.0
# the flood is sent once, and so often again where it is told to come back
_FLOOD_RETRIES = 2
_WARM_S = 10.0
_SETTLE_S = 40.0


class Neighbours(enum.StrEnum):
    """Who asks beside the ordinary tenants."""

    NOBODY = "nobody"
    CROWD = "crowd"
    FLOOD = "flood"


class Neighbourhood:
    """One run: the victim's results, the course of it, and what was left over."""

    def __init__(self, victims: list[Result], recorder: Recorder, leaks: list[str]) -> None:
        self.victims = victims
        self.recorder = recorder
        self.leaks = leaks

    def p95_s(self) -> float:
        return percentile([one.total_s for one in self.victims], 0.95)

    def first_token_p95_s(self) -> float:
        return percentile([one.first_s for one in self.victims], 0.95)


def run(
    file: Path, *, small: bool, seed: int, engine: Path = MEASURED, plot: Path | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Simulate and write the report; returns the summary."""
    constants, stand_in = read_constants(engine)
    seconds, seeds = (20.0, 3) if small else (120.0, 9)
    runs: dict[Neighbours, list[Neighbourhood]] = {kind: [] for kind in Neighbours}
    for place in range(seeds):
        say(f"seed {seed + place}")
        for kind, found in runs.items():
            found.append(simulate(lambda: beside(kind, constants, FLEET, seed + place, seconds)))  # noqa: B023
    every = [one for found in runs.values() for one in found]
    alone, crowd, flooded = (runs[kind] for kind in Neighbours)
    summary = {
        "victim_p95_over_alone": _ratio(flooded, alone, Neighbourhood.p95_s),
        "victim_first_token_p95_over_alone": _ratio(flooded, alone, Neighbourhood.first_token_p95_s),
        "victim_p95_over_crowd": _ratio(flooded, crowd, Neighbourhood.p95_s),
        "crowd_p95_over_alone": _ratio(crowd, alone, Neighbourhood.p95_s),
        "victim_requests": sum(len(one.victims) for one in flooded),
        "errors": sum(result.status != 200 or result.wrong for one in every for result in one.victims),
        "leaks": sum(len(one.leaks) for one in every),
    }
    samples = {
        f"{kind}_total_s": [round(result.total_s, 4) for one in found for result in one.victims]
        for kind, found in runs.items()
    }
    write_report(file, environment(seed=seed, engine="model", stand_in=stand_in), samples, summary)
    if plot is not None:
        lines = [Line.distribution(f"beside {kind}", samples[f"{kind}_total_s"]) for kind in Neighbours]
        latency = Chart("The victim's time to the whole answer", "share of requests", "seconds", lines)
        charts = [latency, *flooded[0].recorder.charts()]
        write_page(plot, "A flood of one tenant, and another's requests", summary, charts, stand_in)
    return summary


async def beside(
    kind: Neighbours, constants: EngineConstants, shape: Shape, seed: int, seconds: float
) -> Neighbourhood:
    """The ordinary tenants for ``seconds`` after a while to warm up, and ``kind`` beside them."""
    world = World(shape, constants, seed=seed)
    catalog = cast(MemoryCatalog, world.catalog)
    ordinary = [name for tenant in range(TENANTS) for name in policy_names(POLICIES_EACH, f"tenant-{tenant}")]
    crowd = policy_names(shape.nodes * shape.slots - len(ordinary), "crowd")
    flood_rate = FLOOD_OVER_LOADS * shape.nodes / (constants.install_s + constants.prepare_s + constants.step_s)
    flood = policy_names(int(flood_rate * seconds), "flood")
    for name in [*ordinary, *crowd, *flood]:
        catalog.publish(name)
    rate = SHARE_OF_WORK * requests_per_s(constants, shape.slots) * shape.nodes
    arrivals = uniform(ordinary, rate, _WARM_S + seconds, random.Random(seed))
    await world.start()
    recorder = Recorder(world)
    work = [Client(world).run_open([Ask(one.at, one.model, TOKENS, PROMPT) for one in arrivals])]
    if kind is Neighbours.CROWD:
        work.append(_crowd(world, crowd, _WARM_S + seconds))
    elif kind is Neighbours.FLOOD:
        work.append(_flood(world, flood, flood_rate))
    results, *_ = await asyncio.gather(*work)
    recorder.stop()
    await asyncio.sleep(_SETTLE_S)
    victims = [one for one in results if one.asked.model.startswith(VICTIM + "/") and one.asked.at >= _WARM_S]
    return Neighbourhood(victims, recorder, world.leaks())


def requests_per_s(constants: EngineConstants, sequences: int) -> float:
    """What one engine answers a second with ``sequences`` of different adapters always running."""
    decoding_s = (TOKENS - 1) * constants.step_seconds(sequences=sequences, adapters=sequences)
    prompts_s = constants.step_seconds(
        sequences=sequences, prompt_tokens=sequences * PROMPT, adapters=sequences, prompted=sequences,
        adapter_tokens=sequences * PROMPT,
    )  # fmt: skip
    return sequences / (decoding_s + prompts_s)


async def _crowd(world: World, policies: list[str], seconds: float) -> list[Result]:
    """Each policy is asked for again as soon as it has answered."""
    loop = asyncio.get_running_loop()
    client = Client(world)
    until = loop.time() + seconds

    async def one(policy: str) -> list[Result]:
        found = []
        while loop.time() < until:
            found.append(await client.one(Ask(0.0, policy, TOKENS, PROMPT), loop.time()))
        return found

    return [result for found in await asyncio.gather(*(one(policy) for policy in policies)) for result in found]


async def _flood(world: World, policies: list[str], rate: float) -> list[Result]:
    asks = [Ask(_WARM_S + place / rate, policy, TOKENS, PROMPT) for place, policy in enumerate(policies)]
    return await Client(world, Patience(retries=_FLOOD_RETRIES)).run_open(asks)


def _ratio(ours: list[Neighbourhood], others: list[Neighbourhood], figure: Callable[[Neighbourhood], float]) -> float:
    """The median of pairs of one seed each."""
    return round(statistics.median(figure(one) / figure(other) for one, other in zip(ours, others, strict=True)), 3)
