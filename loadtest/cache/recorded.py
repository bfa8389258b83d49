"""Traces recorded from simulated nodes: what reaches an arena behind gateways, placement, slots and admission."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Generator, Iterator
from typing import cast

import numpy as np

from sidecar.policies import CachePolicy

from ..simulate.catalog import MemoryCatalog
from ..simulate.client import Ask, Client
from ..simulate.clock import simulate
from ..simulate.constants import EngineConstants, read_constants
from ..simulate.world import Shape, World
from ..traffic import Arrival, drifting_zipf, policy_names, uniform, weak_locality
from .traces import Trace

_SHAPE = Shape(nodes=2, slots=16, arena=64)
_CONCURRENCY = 24
_PROMPT, _TOKENS = 64, 4
# closed-loop clients take the order of arrivals from a scenario, and their times from the fleet
_RATE = 100.0
_PUBLISHES_PER_ASK = 0.2


class Listener:
    """A policy that remembers what it is told, and does as the one behind it."""

    def __init__(self, policy: CachePolicy) -> None:
        self.heard: list[str] = []
        self.sizes: dict[str, int] = {}
        self._policy = policy
        self._present: set[str] = set()

    def __len__(self) -> int:
        return len(self._policy)

    def added(self, key: str, size: int, cost: float) -> None:
        self.heard.append(key)
        self.sizes[key] = size
        self._present.add(key)
        self._policy.added(key, size, cost)

    def touched(self, key: str) -> None:
        if key in self._present:
            self.heard.append(key)
        self._policy.touched(key)

    def victims(self, evictable: Callable[[str], bool]) -> Generator[str, None, None]:
        return self._policy.victims(evictable)

    def evicted(self, key: str) -> None:
        self._present.remove(key)
        self._policy.evicted(key)

    def trace(self, name: str, capacity: int) -> Trace:
        """All that was heard so far."""
        numbers = {key: number for number, key in enumerate(self.sizes)}
        keys = np.array([numbers[key] for key in self.heard], np.int64)
        return Trace(name, keys, np.array(list(self.sizes.values()), np.int64), capacity)


def recorded(seed: int, *, asks: int) -> Iterator[Trace]:
    """One trace a node and scenario, of ``asks`` requests to the fleet. Raises InvalidRequest without a calibration."""
    constants, _ = read_constants()
    few, many = policy_names(200), policy_names(800)
    seconds = asks / _RATE
    for scenario, policies, make, publishes in (
        ("hot set", few, uniform, 0.0),
        ("weak locality", many, weak_locality, 0.0),
        ("drifting Zipf", many, drifting_zipf, 0.0),
        ("revision storm", few, drifting_zipf, _PUBLISHES_PER_ASK),
    ):
        arrivals = make(policies, _RATE, seconds, random.Random(seed))
        listeners = simulate(lambda: _listen(constants, policies, arrivals, publishes, seed))  # noqa: B023
        for number, (listener, capacity) in enumerate(listeners):
            yield listener.trace(f"recorded: {scenario}, node {number}", capacity)


async def _listen(
    constants: EngineConstants, policies: list[str], arrivals: list[Arrival], publishes: float, seed: int
) -> list[tuple[Listener, int]]:
    """What the nodes' arenas heard while a fleet was asked; with ``publishes`` new revisions an ask."""
    world = World(_SHAPE, constants, seed=seed)
    catalog = cast(MemoryCatalog, world.catalog)
    for policy in policies:
        catalog.publish(policy)
    await world.start()
    listeners: list[tuple[Listener, int]] = []
    for node in world.nodes:
        assert node.sidecar is not None
        cache = node.sidecar.machine.state.cache
        listener = Listener(cache.policy)
        cache.policy = listener
        listeners.append((listener, cache.capacity))
    client, chance = Client(world), random.Random(seed)
    part = max(1, len(arrivals) // 100)
    for start in range(0, len(arrivals), part):
        asks = [Ask(one.at, one.model, _TOKENS, _PROMPT) for one in arrivals[start : start + part]]
        await client.run_closed(asks, _CONCURRENCY)
        for _ in range(int(part * publishes)):
            catalog.publish(chance.choice(policies))
    await asyncio.sleep(1.0)
    for node in world.nodes:
        for error in node.failures:
            raise RuntimeError(f"the sidecar of {node.name} broke: what was heard says nothing") from error
    return listeners
