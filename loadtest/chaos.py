"""A day of a fleet, simulated: everything that can die dies, over and over, while clients ask, leave, and publish.

Two gateways and four nodes of eight slots serve 64 policies, more than fit, whose revisions are committed to a real
catalog. Meanwhile sidecars, engines, hosts, gateways and the registrar are killed, gateways and nodes are cut off from
each other, the artifact store fails and hangs, nodes are cordoned; one client in twenty leaves before its answer. Every
answer is compared with the revision that it names, which the engine model takes from the slot that it computed with.
At the end nobody asks, and soon the books must balance to the last lease, pin, byte and slot.
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

from .page import Chart, Line, write_page
from .report import environment, percentile, spread, write_report
from .simulate.catalog import BASE, OpenCatalog
from .simulate.client import Ask, Client, Patience, Result
from .simulate.clock import simulate
from .simulate.constants import MEASURED, EngineConstants, read_constants
from .simulate.faults import Wrecker
from .simulate.recorder import Recorder
from .simulate.registrar import RegistrarProcess
from .simulate.world import Shape, World
from .traffic import Arrival, drifting_zipf, merged, poisson, policy_names

FLEET = Shape(
    nodes=4, slots=8, gateways=2, arena=12, acquire_timeout_s=60.0,
    # answers are short, so that a load rarely waits long for a slot
    settings={"loads_queued": 16, "loads_queued_s": 0.0, "load_timeout_s": 20.0, "slot_age_bound_s": 0.2},
)  # fmt: skip
POLICIES, TENANTS = 64, 4
TOKENS, PROMPT = 64, 32
LEAVING, STREAMED, BASE_SHARE = 0.05, 0.5, 0.1
# so often so many come at once
BURST_EVERY_S, BURST = 300.0, 60
GIVE_UP_S = 180.0
# past the silence after which a gateway counts as dead, far below a lease's time to live: what is still held then was
# not given back
SETTLE_S = 40.0


class Course(msgspec.Struct):
    """What one run came to."""

    results: list[Result]
    faults: dict[str, int]
    unrecovered: list[str]
    lost: int
    published: int
    leaks: list[str]
    charts: list[Chart]

    def summary(self) -> dict[str, Any]:
        served = [one.total_s for one in self.results if one.status == 200]
        return {
            "faults": sum(self.faults.values()),
            "wrong_answers": sum(one.wrong for one in self.results),
            "lost_acknowledged": self.lost,
            "unrecovered": len(self.unrecovered),
            "leaks": len(self.leaks),
            "requests": len(self.results),
            "answered": len(served),
            "published": self.published,
            "total_p95_s": round(percentile(served, 0.95), 3),
        }


def run(
    file: Path, *, small: bool, seed: int, engine: Path = MEASURED, plot: Path | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Simulate and write the report; returns the summary. An hour of simulated time if ``small``, else a day."""
    constants, stand_in = read_constants(engine)
    hours, rate, every_s = (1.0, 2.0, 30.0) if small else (24.0, 1.0, 60.0)
    say(f"{hours:g} h of simulated time")
    with tempfile.TemporaryDirectory(prefix="roost-loadtest-") as scratch:
        course = simulate(
            lambda: chaos(constants, FLEET, Path(scratch), seed, seconds=hours * 3600, rate=rate, every_s=every_s)
        )
    summary = {"simulated_h": hours, **course.summary()}
    samples = {
        "faults": course.faults,
        "statuses": {str(status): count for status, count in Counter(one.status for one in course.results).items()},
        "unrecovered": course.unrecovered[:100],
        "leaks": course.leaks[:100],
        "total_spread_s": spread([round(one.total_s, 3) for one in course.results if one.status == 200]),
    }
    write_report(file, environment(seed=seed, engine="model", stand_in=stand_in), samples, summary)
    if plot is not None:
        latency = Chart(
            "Time to the whole answer",
            "share of answers",
            "seconds",
            [Line.distribution("", [one.total_s for one in course.results if one.status == 200])],
        )
        write_page(plot, "A fleet in which everything dies", summary, [latency, *course.charts], stand_in)
    return summary


async def chaos(
    constants: EngineConstants, shape: Shape, folder: Path, seed: int, *, seconds: float, rate: float, every_s: float
) -> Course:
    """``rate`` requests a second for ``seconds``, a fault each ``every_s``; then quiet, and the books."""
    chance = random.Random(seed)
    with closing(RegistrarProcess(folder / "catalog", constants.adapter_bytes)) as registrar:
        names = [name for tenant in range(TENANTS) for name in policy_names(POLICIES // TENANTS, f"tenant-{tenant}")]
        for name in names:
            registrar.publish(name)
        world = World(shape, constants, seed=seed, catalog=OpenCatalog(registrar.view))
        await world.start()
        recorder = Recorder(world, every_s=5.0)
        wrecker = Wrecker(world, registrar, random.Random(chance.random()), every_s=every_s)
        loop = asyncio.get_running_loop()
        wrecking = loop.create_task(wrecker.run())
        publishing = loop.create_task(_publish(registrar, names, random.Random(chance.random()), 20.0))
        results = await _ask(world, names, chance, seconds, rate)
        wrecking.cancel()
        await wrecker.settle()
        publishing.cancel()
        recorder.stop()
        await asyncio.sleep(SETTLE_S)
        leaks = world.leaks()
        return Course(
            results, dict(wrecker.counts), wrecker.unrecovered, len(registrar.lost()), len(registrar.acknowledged),
            leaks, recorder.charts(),
        )  # fmt: skip


async def _ask(world: World, names: list[str], chance: random.Random, seconds: float, rate: float) -> list[Result]:
    """Open loop: by popularity that drifts, some for the base; some clients leave in the middle."""
    arrivals = merged(
        drifting_zipf(names, rate * (1 - BASE_SHARE), seconds, chance, swaps_per_s=0.02),
        [Arrival(at, BASE) for at in poisson(rate * BASE_SHARE, seconds, chance)],
        [Arrival(at, chance.choice(names)) for at in poisson(1 / BURST_EVERY_S, seconds, chance) for _ in range(BURST)],
    )
    client = Client(world, Patience(retries=20, resends=5))
    loop = asyncio.get_running_loop()
    begun = loop.time()
    running: set[asyncio.Task[Result]] = set()
    results: list[Result] = []

    def ended(task: asyncio.Task[Result]) -> None:
        running.discard(task)
        results.append(task.result())

    for arrival in arrivals:
        await asyncio.sleep(max(0.0, begun + arrival.at - loop.time()))
        ask = Ask(arrival.at, arrival.model, chance.randint(1, TOKENS), PROMPT, chance.random() < STREAMED)
        leaves_s = chance.uniform(0.0, 1.0) if chance.random() < LEAVING else GIVE_UP_S
        task = loop.create_task(client.one(ask, begun + arrival.at, give_up_s=leaves_s))
        running.add(task)
        task.add_done_callback(ended)
    while running:
        await asyncio.wait(list(running))
    return results


async def _publish(registrar: RegistrarProcess, names: list[str], chance: random.Random, every_s: float) -> None:
    while True:
        await asyncio.sleep(chance.expovariate(1 / every_s))
        registrar.publish(chance.choice(names))
