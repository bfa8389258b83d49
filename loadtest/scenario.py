"""One kind of traffic at a time, on a simulated fleet or on a real mesh, with what its clients see of it.

On a mesh the policies are those of its catalog, so that only arrivals are ours to choose. A simulated fleet can also
change under its clients: nodes come and go, and every policy gets a new revision while it is being asked for.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

from ops.cli.client import POLICIES, ApiClient
from wire.outcomes import InvalidRequest

from .base_model import PLAIN_TOKENS
from .generator import Generator, Sample, completion
from .page import Chart, Line, write_page
from .report import environment, percentile, write_report
from .simulate.catalog import BASE, MemoryCatalog
from .simulate.client import Ask, Client, Result
from .simulate.clock import simulate
from .simulate.constants import EngineConstants, read_constants
from .simulate.recorder import Recorder
from .simulate.world import Shape, World
from .traffic import SCENARIOS, Arrival, beside_a_base, merged, policy_names, unique_burst

PROMPT, TOKENS = 64, 16
FLEET = Shape(nodes=4, slots=16, gateways=2, arena=48)
HOT_SET = 96
_BURST, _BASE_RATE = 16, 4.0
_SETTLE_S = 40.0

# (world, policies, seconds): what happens to the fleet meanwhile
Happening = Callable[[World, Sequence[str], float], Coroutine[Any, Any, None]]


async def _scale_out_and_in(world: World, policies: Sequence[str], seconds: float) -> None:
    """The last node joins after a third of the time and leaves after another."""
    every, fewer = world.addresses, world.addresses[:-1]
    for addresses in (fewer, every, fewer):
        for gateway in world.gateways:
            gateway.update(addresses)
        await asyncio.sleep(seconds / 3)


async def _revision_storm(world: World, policies: Sequence[str], seconds: float) -> None:
    """Every policy gets a new revision, evenly over the middle third of the time."""
    await asyncio.sleep(seconds / 3)
    for policy in policies:
        cast(MemoryCatalog, world.catalog).publish(policy)
        await asyncio.sleep(seconds / 3 / len(policies))


# name -> (the arrivals' scenario, what happens meanwhile)
HAPPENINGS: dict[str, tuple[str, Happening]] = {
    "scale-out-and-in": ("zipf-drift", _scale_out_and_in),
    "revision-storm": ("zipf-drift", _revision_storm),
}
BASE_BESIDE_BURSTS = "base-beside-bursts"
NAMES = (*SCENARIOS, *HAPPENINGS, BASE_BESIDE_BURSTS)


def run(
    file: Path, *, name: str, seed: int, rate: float, seconds: float, url: str = "", key: str = "",
    plot: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Send the traffic and write the report; returns the summary. With ``url``, to the gateway of a real mesh.

    Raises InvalidRequest for a scenario that there is none of, or that needs a simulated fleet.
    """
    if name not in NAMES:
        raise InvalidRequest(f"there is no scenario {name}: {', '.join(NAMES)}", field="scenario")
    if url:
        if name in HAPPENINGS:
            raise InvalidRequest(f"{name} changes the fleet, which only a simulated one lets us", field="scenario")
        return _run_on_mesh(file, name, seed, rate, seconds, url, key)
    constants, stand_in = read_constants()
    results, recorder, leaks, counts = simulate(lambda: on_fleet(constants, FLEET, name, seed, rate, seconds))
    summary = {"scenario": name, **_of_results(results), **counts, "leaks": len(leaks)}
    samples = {"total_s": [round(one.total_s, 4) for one in results], "leaks": leaks}
    write_report(file, environment(seed=seed, engine="model", stand_in=stand_in), samples, summary)
    if plot is not None:
        served = [one for one in results if one.status == 200]
        lines = [
            Line.distribution("first token", [one.first_s for one in served]),
            Line.distribution("whole answer", [one.total_s for one in served]),
        ]
        charts = [Chart("Latency", "share of requests", "seconds", lines), *recorder.charts()]
        write_page(plot, f"Scenario: {name}", summary, charts, stand_in)
    return summary


async def on_fleet(
    constants: EngineConstants, shape: Shape, name: str, seed: int, rate: float, seconds: float
) -> tuple[list[Result], Recorder, list[str], dict[str, int]]:
    """The results, the course, what was left over, and how many loads it took."""
    world = World(shape, constants, seed=seed)
    policies = policy_names(HOT_SET)
    for policy in policies:
        cast(MemoryCatalog, world.catalog).publish(policy)
    await world.start()
    recorder = Recorder(world)
    happening = asyncio.get_running_loop().create_task(
        HAPPENINGS[name][1](world, policies, seconds) if name in HAPPENINGS else asyncio.sleep(seconds)
    )
    results = await Client(world).run_open(_asks(arrivals(name, policies, BASE, rate, seconds, random.Random(seed))))
    await happening
    recorder.stop()
    await asyncio.sleep(_SETTLE_S)
    loads = {"fetches": world.store.fetched.total(), "installs": world.installs}
    return results, recorder, world.leaks(), loads


def arrivals(
    name: str, policies: Sequence[str], base: str, rate: float, seconds: float, chance: random.Random
) -> list[Arrival]:
    """Who asks for what, and when, in scenario ``name``."""
    if name == BASE_BESIDE_BURSTS:
        count = max(1, len(policies) // _BURST)
        bursts = [
            [
                Arrival(place * seconds / count, one.model)
                for one in unique_burst(policies[place * _BURST : (place + 1) * _BURST])
            ]
            for place in range(count)
        ]
        return beside_a_base(merged(*bursts), base, _BASE_RATE, chance)
    kind = HAPPENINGS[name][0] if name in HAPPENINGS else name
    return SCENARIOS[kind](policies, rate, seconds, chance)


def _asks(found: Sequence[Arrival]) -> list[Ask]:
    return [Ask(one.at, one.model, TOKENS, PROMPT) for one in found]


def _of_results(results: Sequence[Result]) -> dict[str, Any]:
    served = [one for one in results if one.status == 200]
    found: dict[str, Any] = {
        "requests": len(results),
        "answered": len(served),
        "wrong_answers": sum(one.wrong for one in results),
        "refusals": sum(len(one.refusals) for one in results),
    }
    policies = [one for one in served if "/" in one.asked.model]
    base = [one for one in served if "/" not in one.asked.model]
    for prefix, ones in (("", policies), ("base_", base)):
        if ones:
            found |= _percentiles(prefix, [one.first_s for one in ones], [one.total_s for one in ones])
    ratios = [told.true_s / told.said_s for one in served for told in one.refusals]
    if ratios:
        found["retry_after_ratio_p95"] = round(percentile([max(one, 1 / one) for one in ratios], 0.95), 3)
    return found


def _percentiles(prefix: str, first: Sequence[float], total: Sequence[float]) -> dict[str, float]:
    return {
        f"{prefix}{figure}_p{share}_s": round(percentile(values, share / 100), 4)
        for figure, values in (("first_token", first), ("total", total))
        for share in (50, 95)
    }


def _run_on_mesh(file: Path, name: str, seed: int, rate: float, seconds: float, url: str, key: str) -> dict[str, Any]:
    client = ApiClient(url, key)
    known = client.call_pages(POLICIES, "policies", {"limit": 1000})["policies"]
    policies = [policy["policy"] for policy in known if policy.get("latest")]
    if not policies:
        raise InvalidRequest(f"the catalog of {url} has no policy with a revision to ask for", field="url")
    base = str(known[0]["base"])
    chance = random.Random(seed)
    found = arrivals(name, policies, base, rate, seconds, chance)
    requests = [
        (
            one.at,
            completion(
                one.model, prompt=[chance.randrange(PLAIN_TOKENS) for _ in range(PROMPT)], tokens=TOKENS, token=key
            ),
        )
        for one in found
    ]
    tries = uvloop.run(_send(url, requests))
    summary = {"scenario": name, **_of_tries(found, tries)}
    samples = {"total_s": [round(each[-1].done - each[0].intended, 4) for each in tries]}
    write_report(file, environment(seed=seed, engine="a mesh's"), samples, summary)
    return summary


async def _send(url: str, requests: Sequence[tuple[float, bytes]]) -> list[list[Sample]]:
    parts = urlsplit(url)
    generator = Generator(parts.hostname or "127.0.0.1", parts.port or 80)
    try:
        return await generator.run_patiently(requests)
    finally:
        generator.close()


def _of_tries(asked: Sequence[Arrival], tries: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    served = [(one, each) for one, each in zip(asked, tries, strict=True) if each[-1].status == 200]
    found: dict[str, Any] = {
        "requests": len(tries), "answered": len(served), "refusals": sum(len(each) - 1 for each in tries),
    }  # fmt: skip
    for prefix, is_base in (("", False), ("base_", True)):
        ones = [each for one, each in served if ("/" not in one.model) is is_base]
        if ones:
            first = [each[-1].first_token - each[0].intended for each in ones]
            found |= _percentiles(prefix, first, [each[-1].done - each[0].intended for each in ones])
    return found
