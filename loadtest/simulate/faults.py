"""What goes wrong in a simulation, one fault after another, some at the same time, and whether the fleet recovers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from wire.node import Cordon, Health
from wire.outcomes import RoostError

from .gateway import GatewayProcess
from .node import NodeProcesses
from .registrar import RegistrarProcess
from .sockets import sockets
from .storage import Faults
from .world import World

# after a fault has ended and its engine, if it lost one, has started again
RECOVERY_S = 15.0
_POLL_S = 0.25
# how long, and how closely, to watch for a moment at which a cordon has most to undo
_WATCH_S, _GLANCE_S = 600.0, 0.05


class Wrecker:
    """Injects faults into a world, on average one each ``every_s``, until cancelled; whoever is down is left alone."""

    def __init__(self, world: World, registrar: RegistrarProcess, chance: random.Random, *, every_s: float) -> None:
        self._world = world
        self._registrar = registrar
        self._chance = chance
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._busy: set[str] = set()
        self._under_way: set[asyncio.Task[None]] = set()
        self._kinds: list[Callable[[], Awaitable[None]]] = [
            self._sidecar, self._engine, self._host, self._gateway, self._cut, self._cut, self._short_cut, self._store,
            self._registrar_dies, self._cordon, self._cordon_under_load,
        ]  # fmt: skip
        self.counts: Counter[str] = Counter()
        self.unrecovered: list[str] = []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._chance.expovariate(1 / self._every_s))
            fault = self._loop.create_task(self._one(self._chance.choice(self._kinds)))
            self._under_way.add(fault)
            fault.add_done_callback(self._under_way.discard)

    async def settle(self) -> None:
        """Wait until every fault has ended."""
        while self._under_way:
            await asyncio.wait(list(self._under_way))

    async def _one(self, kind: Callable[[], Awaitable[None]]) -> None:
        await kind()

    # faults

    async def _sidecar(self) -> None:
        node = self._take_node()
        if node is not None:
            self._count("sidecar")
            node.kill_sidecar()
            await asyncio.sleep(self._chance.uniform(0.2, 8.0))
            node.start()
            await self._until_back(node, "its sidecar died")

    async def _engine(self) -> None:
        node = self._take_node()
        if node is not None:
            self._count("engine")
            node.kill_engine()
            await self._until_back(node, "its engine died", self._world.constants.start_s)

    async def _host(self) -> None:
        node = self._take_node()
        if node is not None:
            self._count("host")
            node.kill_engine()
            node.kill_sidecar()
            await asyncio.sleep(self._chance.uniform(1.0, 60.0))
            node.start()
            await self._until_back(node, "its host died", self._world.constants.start_s)

    async def _gateway(self) -> None:
        up = [gateway for gateway in self._world.gateways if gateway.up]
        if len(up) > 1:
            self._count("gateway")
            gateway = self._chance.choice(up)
            gateway.crash()
            await asyncio.sleep(self._chance.uniform(0.2, 10.0))
            gateway.start()
            await self._until(lambda: self._hears(gateway), f"{gateway.name} was killed", 0.0)

    async def _cut(self) -> None:
        await self._cut_for(self._chance.uniform(6.0, 60.0))

    async def _short_cut(self) -> None:
        await self._cut_for(self._chance.uniform(0.2, 4.0))

    async def _cut_for(self, seconds: float) -> None:
        node = self._take_node()
        if node is not None:
            self._count("cut" if seconds > 5.0 else "short cut")
            gateway = self._chance.choice(self._world.gateways).name
            self._world.network.cut(gateway, node.name)
            await asyncio.sleep(seconds)
            self._world.network.heal(gateway, node.name)
            await self._until_back(node, f"{gateway} did not reach it")

    async def _store(self) -> None:
        if "store" not in self._busy:
            self._busy.add("store")
            self._count("store")
            self._world.store.faults = Faults(failing=0.3, hanging=0.1)
            await asyncio.sleep(self._chance.uniform(5.0, 30.0))
            self._world.store.faults = Faults()
            self._busy.discard("store")

    async def _registrar_dies(self) -> None:
        if self._registrar.up and "registrar" not in self._busy:
            self._busy.add("registrar")
            self._count("registrar")
            self._registrar.die_at_next_commit(after=self._chance.random() < 0.5)
            await self._registrar.died.wait()
            await asyncio.sleep(self._chance.uniform(0.5, 5.0))
            self._registrar.restart()
            self._busy.discard("registrar")

    async def _cordon(self) -> None:
        node = self._take_node()
        if node is not None:
            self._count("cordon")
            await self._out_and_in(node)

    async def _cordon_under_load(self) -> None:
        """A node on which a slot is kept for a load that waits: refusing that load moves others that wait."""
        deadline = self._loop.time() + _WATCH_S
        while self._loop.time() < deadline:
            node = next((one for one in self._free() if _keeps_a_slot(one)), None)
            if node is not None and len(self._free()) > 1:
                self._busy.add(node.name)
                self._count("cordon under load")
                await self._out_and_in(node)
                return
            await asyncio.sleep(_GLANCE_S)

    async def _out_and_in(self, node: NodeProcesses) -> None:
        if await self._set_cordon(node, on=True):
            await asyncio.sleep(self._chance.uniform(2.5, 30.0))
            if self._chance.random() < 0.5:
                await self._dies_cordoned(node)
            await asyncio.sleep(self._chance.uniform(2.5, 30.0))
            for _ in range(100):
                if await self._set_cordon(node, on=False):
                    break
                await asyncio.sleep(1.0)
        await self._until_back(node, "it was cordoned")

    async def _dies_cordoned(self, node: NodeProcesses) -> None:
        self._count("cordoned sidecar")
        node.kill_sidecar()
        await asyncio.sleep(self._chance.uniform(0.2, 8.0))
        node.start()
        if node.sidecar is None or not node.sidecar.machine.state.cordoned:
            self.unrecovered.append(f"{node.name} was cordoned, and its next sidecar does not know it")

    async def _set_cordon(self, node: NodeProcesses, *, on: bool) -> bool:
        requester = sockets(self._world.network, "operator").requester(node.settings.endpoint, Any, Any, peer=node.name)
        try:
            await requester.request(Cordon(on=on), timeout_s=5.0)
        except RoostError:
            return False
        finally:
            requester.close()
        return True

    # recovery

    async def _until_back(self, node: NodeProcesses, what: str, extra_s: float = 0.0) -> None:
        await self._until(lambda: self._is_back(node), f"{node.name}: {what}", extra_s)
        self._busy.discard(node.name)

    async def _until(self, well: Callable[[], bool], what: str, extra_s: float) -> None:
        deadline = self._loop.time() + RECOVERY_S + extra_s
        while not well():
            if self._loop.time() > deadline:
                self.unrecovered.append(f"{what}, and at {self._loop.time():.0f} s it had not recovered")
                return
            await asyncio.sleep(_POLL_S)

    def _is_back(self, node: NodeProcesses) -> bool:
        if node.sidecar is None or not all(engine.ready for engine in node.engines.values()):
            return False
        return all(self._well(gateway, node.name) for gateway in self._world.gateways if gateway.up)

    def _hears(self, gateway: GatewayProcess) -> bool:
        return gateway.up and all(
            self._well(gateway, node.name) for node in self._world.nodes if node.name not in self._busy
        )

    def _well(self, gateway: GatewayProcess, name: str) -> bool:
        known = gateway.nodes[name]
        if not known.heard or known.doubtful or known.draining:
            return False
        return any(engine.health is Health.READY for engine in known.engines.values())

    def _take_node(self) -> NodeProcesses | None:
        """A node that nothing is wrong with, and at least one more besides."""
        free = self._free()
        if len(free) < 2:
            return None
        node = self._chance.choice(free)
        self._busy.add(node.name)
        return node

    def _free(self) -> list[NodeProcesses]:
        return [node for node in self._world.nodes if node.name not in self._busy]

    def _count(self, kind: str) -> None:
        self.counts[kind] += 1


def _keeps_a_slot(node: NodeProcesses) -> bool:
    engines = node.sidecar.machine.state.engines.values() if node.sidecar else ()
    return any(slot.claimed_by for engine in engines for slot in engine.slots.values())
