"""The whole of a simulation: nodes, gateways, a catalog and a store, and the books of all at its end."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec

from catalog.names import parse_reference
from gateway.http import Pair
from gateway.placement import Placer
from gateway.settings import NodeAddress
from sidecar.audit import audit
from sidecar.extents import block_bytes

from .catalog import BASE, FINGERPRINT, MemoryCatalog
from .constants import EngineConstants
from .engine import BASE_CONTENT
from .gateway import Answer, GatewayProcess, MakePlacer
from .network import Network
from .node import NodeProcesses, Refuse, node_settings
from .storage import ArtifactStore

# until every feed was heard and every engine looked at
WARM_UP_S = 3.0
# releases between one gateway and one node until the connection counts as broken
_LOST_BY_A_CUT = 16


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Of a fleet. ``arena`` counts adapters; ``settings`` are fields of the sidecars' settings that differ."""

    nodes: int
    slots: int
    gateways: int = 1
    arena: int = 256
    stock: bool = False
    settings: dict[str, Any] = {}
    acquire_timeout_s: float = 120.0


class World:
    """Made inside of a simulation's loop. Hosts are called ``n00``... and ``g0``...

    Without a ``catalog`` it has one in memory, of revisions as large as the constants say; with another one, ``base``
    is the name and fingerprint of what the engines run, and ``largest`` the bytes of the largest revision in it.
    """

    def __init__(
        self,
        shape: Shape,
        constants: EngineConstants,
        *,
        seed: int,
        catalog: Any = None,
        base: tuple[str, str] = (BASE, FINGERPRINT),
        largest: int = 0,
        make_placer: MakePlacer = Placer,
        refuse: Refuse | None = None,
    ) -> None:
        self.shape = shape
        self.constants = constants
        self.chance = random.Random(seed)
        self.network = Network()
        self.catalog = catalog if catalog is not None else MemoryCatalog(constants.adapter_bytes)
        self.store = ArtifactStore(constants, random.Random(self.chance.random()))
        room = shape.arena * block_bytes(max(constants.adapter_bytes, largest))
        self.base, fingerprint = base
        names = [f"n{number:02d}" for number in range(shape.nodes)]
        self.nodes = [
            NodeProcesses(
                node_settings(
                    name, slots=shape.slots, base=self.base, fingerprint=fingerprint, arena_bytes=room, **shape.settings
                ),
                self.network,
                self.store,
                constants,
                stock=shape.stock,
                refuse=refuse,
            )
            for name in names
        ]
        engines = {
            (engine.settings.host, engine.settings.port): (node.name, engine)
            for node in self.nodes
            for engine in node.engines.values()
        }
        self.gateways = [
            GatewayProcess(
                f"g{number}",
                self.network,
                self.addresses,
                self.catalog,
                engines,
                make_placer=make_placer,
                acquire_timeout_s=shape.acquire_timeout_s,
            )
            for number in range(shape.gateways)
        ]

    async def start(self) -> None:
        """Everything up, and every gateway has heard every node."""
        for node in self.nodes:
            node.start()
        for gateway in self.gateways:
            gateway.start()
        await asyncio.sleep(WARM_UP_S)

    @property
    def addresses(self) -> tuple[NodeAddress, ...]:
        return tuple(node.address for node in self.nodes)

    @property
    def installs(self) -> int:
        """By all nodes, in all lives of their sidecars."""
        return sum(node.count("installed") for node in self.nodes)

    def wrong(self, asked: str, answer: Answer) -> bool:
        """Whether an answer that counts as good was made by anything but what was ``asked`` for and what it names."""
        reference = answer.revision
        if reference.partition("@")[0] != asked.partition("@")[0] or ("@" in asked and reference != asked):
            return True
        if "/" not in reference:
            return answer.text != BASE_CONTENT
        return answer.text != self.catalog.view().resolve(parse_reference(reference)).digest

    # the books, once nothing is under way

    def leaks(self) -> list[str]:
        """What was not given back, one sentence each; to be asked when nobody asks for anything any more.

        That is also what no release told of: a lease must never have to wait for its own end, and no more releases
        may be missed, and made up for, than a cut of the network can have lost.
        """
        found: list[str] = []
        for node in self.nodes:
            found += [f"{node.name}: {error!r} broke the sidecar" for error in node.failures]
            found += node.findings
            if expired := node.count("leases_expired"):
                found.append(f"{expired} leases of {node.name} expired")
            if node.sidecar is not None:
                found += _of_node(node)
        unheard = sum(node.count("leases_given_back_unheard") for node in self.nodes)
        if unheard > _LOST_BY_A_CUT * self.network.cuts:
            found.append(f"{unheard} leases were given back unheard, and the network was cut {self.network.cuts} times")
        for gateway in self.gateways:
            for known in gateway.nodes if gateway.up else ():
                if known.leased:
                    found.append(f"{gateway.name} counts {known.leased} leases of {known.name}")
        return found


def _of_node(node: NodeProcesses) -> list[str]:
    """Leases, waiters, pins, bytes and slots of one node against each other, the arena and the engines."""
    assert node.sidecar is not None
    machine = node.sidecar.machine
    state = machine.state
    found = audit(state)
    for what, count in (
        ("leases", len(state.leases)),
        ("waiters", len(machine.waiters)),
        ("loads", sum(1 for _ in state.queue)),
        ("outstanding", sum(engine.outstanding for engine in state.engines.values())),
    ):
        if count:
            found.append(f"{node.name} has {count} {what} left")
    used = sum(block_bytes(state.cache.extent(digest).length) for digest in state.cache)
    if used != state.cache.used:
        found.append(f"{node.name} counts {state.cache.used} bytes of its arena as used, of {used}")
    for digest in state.cache:
        if state.cache.pinned(digest):
            found.append(f"{node.name} has {digest} pinned for nobody")
        elif node.arena is not None and node.arena.holds(state.cache.extent(digest)) != digest:
            found.append(f"{node.name} takes {digest} for resident, and its arena holds something else")
    if node.arena is not None:
        found += node.arena.broken
    for name, process in node.engines.items():
        model = process.model
        if model is None or not model.alive:
            continue
        known = set(state.engines[name].slots)
        if known != set(model.installed):
            found.append(f"{name} holds {len(model.installed)} adapters, its sidecar knows {len(known)}")
        if model.unfinished:
            found.append(f"{name} has {model.unfinished} unfinished requests")
        for adapter, slot in model.installed.items():
            if not adapter.endswith("@" + model.contents[slot]):
                found.append(f"{name} has {model.contents[slot]} in the slot of {adapter}")
    return found


def completion(
    model: str, *, prompt_tokens: int, max_tokens: int, request: str, stream: bool = True, timeout_s: float = 0.0
) -> tuple[list[Pair], bytes]:
    """Headers and body of a request for ``GatewayProcess.ask``."""
    body = {"model": model, "prompt": [1] * prompt_tokens, "max_tokens": max_tokens, "stream": stream}
    headers: list[Pair] = [(b"x-request-id", request.encode())]
    if timeout_s:
        headers.append((b"x-request-timeout", b"%.3f" % timeout_s))
    return headers, msgspec.json.encode(body)
