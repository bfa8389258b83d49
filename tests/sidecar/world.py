"""A machine in virtual time, with storage, an engine and clients: for what only shows over many loads."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable

import msgspec

from backends.interface import Removal
from catalog.names import adapter_name
from sidecar.audit import audit
from sidecar.effects import Answer, AnyEffect, CancelFetch, ReadInstalled, StartFetch, StartInstall, StartRemove
from sidecar.events import (
    AnyEvent,
    Asked,
    EngineUp,
    FetchCancelled,
    FetchDone,
    GatewayHeard,
    InstallDone,
    InstalledRead,
    Released,
    RemoveDone,
    Tick,
)
from sidecar.machine import Machine
from wire.node import Acquire, Granted, Refused

from .bench import BASE, SIZE, digest, limits, settings

TICK_S = 0.05


class Request(msgspec.Struct):
    """One request of a client, from its first ask to its end. Times are the world's."""

    tenant: str
    number: int
    asked: float
    granted: float = math.nan
    refusals: list[tuple[float, float]] = msgspec.field(default_factory=list)

    @property
    def waited(self) -> float:
        return self.granted - self.asked


class World:
    """One engine; fetches (on ``lanes``) and installs take what they are set to, a request holds its slot ``use_s``.

    Clients come back when they are told to, in whole seconds as HTTP has it.
    """

    def __init__(
        self,
        *,
        slots: int,
        fetch_s: float = 0.2,
        install_s: float = 0.1,
        use_s: float = 1.0,
        lanes: int = 1,
        seed: int = 1,
        noise: float = 0.0,
        **changes: object,
    ) -> None:
        self.machine = Machine(settings(**{"arena_bytes": 1 << 40, **changes}))  # type: ignore[arg-type]
        self.random = random.Random(seed)
        self.fetch_s, self.install_s, self.use_s, self.noise = fetch_s, install_s, use_s, noise
        self.now = 0.0
        self.in_use: set[str] = set()
        self.requests: list[Request] = []
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        self._asks: dict[int, tuple[Request, Callable[[], None]]] = {}
        self._lanes = [0.0] * lanes
        self._fetching: dict[int, str] = {}
        self._installed: set[str] = set()
        self.send(EngineUp(engine="e1", limits=limits(slots), installed=frozenset(), host="h", port=1))
        self.at(TICK_S, self._tick)

    # clients

    def request(self, tenant: str, number: int, then: Callable[[], None] = lambda: None) -> Request:
        """Ask for adapter ``number`` now, and again when told so; ``then`` follows when the request ends."""
        request = Request(tenant, number, self.now)
        self.requests.append(request)
        self._ask(request, then)
        return request

    def client(self, tenant: str, choose: Callable[[], int], until: float) -> None:
        """Request after request, each when the one before it has ended."""

        def following() -> None:
            if self.now < until:
                self.request(tenant, choose(), following)

        following()

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._agenda and self._agenda[0][0] <= end:
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        self.now = end

    def at(self, after_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + after_s, next(self._numbers), action))

    def _ask(self, request: Request, then: Callable[[], None]) -> None:
        number = next(self._numbers)
        self._asks[number] = request, then
        acquire = Acquire(
            gateway="g1",
            instance="i1",
            lease=number,
            base=BASE,
            tenant=request.tenant,
            digest=digest(request.number),
            size=SIZE,
            rank=8,
            ttl_s=1e6,
        )
        self.send(Asked(ask=number, request=acquire, deadline=self.now + 1e6))

    def _answered(self, ask: int, answer: Granted | Refused) -> None:
        request, then = self._asks.pop(ask)
        if isinstance(answer, Granted):
            request.granted = self.now

            def end() -> None:
                self.send(Released(gateway="g1", instance="i1", leases=(ask,)))
                then()

            self.at(self._takes(self.use_s), end)
        else:
            assert answer.retry_after_s is not None
            request.refusals.append((self.now, answer.retry_after_s))
            self.at(max(1.0, math.ceil(answer.retry_after_s)), lambda: self._ask(request, then))

    # the node

    def send(self, event: AnyEvent) -> None:
        for effect in self.machine.handle(event, self.now):
            self._perform(effect)

    def _perform(self, effect: AnyEffect) -> None:
        if isinstance(effect, Answer):
            self._answered(effect.ask, effect.answer)
        elif isinstance(effect, StartFetch):
            generation = effect.extent.generation
            self._fetching[generation] = effect.digest
            end = max(heapq.heappop(self._lanes), self.now) + self._takes(self.fetch_s)
            heapq.heappush(self._lanes, end)
            self.at(end - self.now, lambda: self._fetched(generation))
        elif isinstance(effect, CancelFetch):
            name = self._fetching.pop(effect.generation)
            self.at(0.0, lambda: self.send(FetchCancelled(digest=name, generation=effect.generation)))
        elif isinstance(effect, StartInstall):
            self._installed.add(effect.adapter)
            self._call(self.install_s, InstallDone(engine="e1", op=effect.op))
        elif isinstance(effect, StartRemove):
            self._installed.discard(effect.adapter)
            self._call(self.install_s / 10, RemoveDone(engine="e1", op=effect.op, removal=Removal.REMOVED))
        elif isinstance(effect, ReadInstalled):
            names = frozenset(self._installed)
            self._call(0.001, InstalledRead(engine="e1", op=effect.op, names=names))

    def _fetched(self, generation: int) -> None:
        name = self._fetching.pop(generation, None)
        if name is not None:
            self.send(FetchDone(digest=name, generation=generation))

    def _call(self, seconds: float, ended: AnyEvent) -> None:
        self.at(self._takes(seconds), lambda: self.send(ended))

    def _takes(self, seconds: float) -> float:
        return seconds * self.random.lognormvariate(0.0, self.noise) if self.noise else seconds

    def _tick(self) -> None:
        self.at(TICK_S, self._tick)
        self.send(GatewayHeard(gateway="g1", instance="i1"))
        self.send(Tick())

    # what it shows

    def check(self) -> None:
        assert audit(self.machine.state) == []
        assert self.machine.state.counts["audit_findings"] == 0

    def serving(self, tenant: str, number: int) -> bool:
        return self.machine.state.engines["e1"].serving(adapter_name(tenant, digest(number))) is not None
