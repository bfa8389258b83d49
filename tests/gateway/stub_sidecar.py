"""A sidecar as gateways see it: real sockets, grants at once, refusals on demand."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from pathlib import Path

from catalog.names import adapter_name
from gateway.settings import NodeAddress
from wire.node import (
    Acquire,
    AnswerOfNode,
    AskOfNode,
    AskState,
    Cordon,
    EngineReport,
    GatewayAlive,
    Granted,
    Health,
    Holding,
    NodeDelta,
    NodeReport,
    Refused,
    Release,
    ReportOfNode,
    Residency,
)
from wire.outcomes import Outcome
from wire.sockets import CurveKeys, FeedPublisher, Reply, Responder

from .fleet_states import BASE, FINGERPRINT, TARGETS
from .stub_engine import StubEngine

_epochs = itertools.count(1)

Script = Callable[["StubSidecar", Acquire, Reply[AnswerOfNode]], None]


class StubSidecar:
    """One node. ``held`` are the leases out now; ``scripts`` are used up first, one an ``Acquire``."""

    def __init__(self, name: str, folder: Path, engines: list[StubEngine]) -> None:
        self.address = NodeAddress(name, f"ipc://{folder}/{name}.sock", f"ipc://{folder}/{name}.feed")
        self.curve: CurveKeys | None = None
        self.engines = engines
        self.health = Health.READY
        self.detail = ""
        self.draining = False
        self.fingerprint = FINGERPRINT
        self.max_rank = 16
        self.token = ""
        self.backend = "vllm"
        # of engines, by name, that are of another
        self.other_backends: dict[str, str] = {}
        self.resident: dict[str, Residency] = {}
        self.serving: set[str] = set()
        self.scripts: deque[Script] = deque()
        self.acquired: list[Acquire] = []
        self.held: dict[int, Acquire] = {}
        self.granted: dict[int, Granted] = {}
        self.released: list[int] = []
        self.failed_engines: list[str] = []
        # what AskState is answered with first, where it is to be of another time
        self.states: deque[NodeReport] = deque()
        self.asked_for_state = 0
        self.alive: list[GatewayAlive] = []
        self.told: list[Holding] = []
        self.epoch = 0
        self._next_engine = itertools.cycle(range(len(engines)))
        self._responder: Responder[AskOfNode, AnswerOfNode] | None = None
        self._feed: FeedPublisher[ReportOfNode] | None = None

    def start(self) -> None:
        self.epoch = next(_epochs)
        address = self.address
        self._responder = Responder(address.endpoint, AskOfNode, AnswerOfNode, self._on_ask, curve=self.curve)
        self._feed = FeedPublisher(
            address.feed_endpoint, ReportOfNode, epoch=self.epoch, heartbeat_s=0.05, curve=self.curve
        )

    def stop(self) -> None:
        if self._responder is not None and self._feed is not None:
            self._responder.close()
            self._feed.close()
            self._responder = self._feed = None

    def report(self) -> NodeReport:
        engines = tuple(self._engine_report(engine) for engine in self.engines)
        return NodeReport(
            node=self.address.name,
            endpoint=self.address.endpoint,
            epoch=self.epoch,
            engines=engines,
            resident=self.resident,
            arena_bytes=1 << 30,
            arena_used=0,
            draining=self.draining,
            base_names=(BASE,),
            number=0 if self._feed is None else self._feed.number,
        )

    def announce(self) -> None:
        """Publish full state."""
        self.publish(self.report())

    def publish(self, message: NodeReport | NodeDelta) -> None:
        assert self._feed is not None
        self._feed.publish(message)

    def grant(self, ask: Acquire, reply: Reply[AnswerOfNode], *, waited: bool = False) -> None:
        turns = [self.engines[next(self._next_engine)] for _ in self.engines]
        next(self._next_engine)
        engine = next((engine for engine in turns if self._backend_of(engine) != ask.not_by), None)
        if engine is None:
            refuse(Outcome.INVALID_REQUEST, elsewhere=True)(self, ask, reply)
            return
        adapter = adapter_name(ask.tenant, ask.digest) if ask.digest else ask.base
        self.held[ask.lease] = ask
        granted = self.granted[ask.lease] = Granted(
            lease=ask.lease,
            engine=engine.name,
            host="127.0.0.1",
            port=engine.port,
            adapter=adapter,
            waited=waited,
            token=self.token,
            backend=self._backend_of(engine),
        )
        reply(granted)

    def _backend_of(self, engine: StubEngine) -> str:
        return self.other_backends.get(engine.name, self.backend)

    def _engine_report(self, engine: StubEngine) -> EngineReport:
        return EngineReport(
            engine=engine.name,
            backend=self._backend_of(engine),
            base=BASE,
            fingerprint=self.fingerprint,
            health=self.health,
            detail=self.detail,
            slots=4,
            max_rank=self.max_rank,
            targets=TARGETS,
            serving=tuple(sorted(self.serving)),
            outstanding=sum(lease.engine == engine.name for lease in self.granted.values()),
        )

    def _on_ask(self, ask: AskOfNode, reply: Reply[AnswerOfNode]) -> None:
        if isinstance(ask, Acquire):
            self.acquired.append(ask)
            if self.scripts:
                self.scripts.popleft()(self, ask, reply)
            else:
                self.grant(ask, reply)
        elif isinstance(ask, Release):
            self.released.extend(ask.leases)
            for lease in ask.leases:
                self.held.pop(lease, None)
                self.granted.pop(lease, None)
            if ask.failed_engine:
                self.failed_engines.append(ask.failed_engine)
        elif isinstance(ask, AskState):
            self.asked_for_state += 1
            reply(self.states.popleft() if self.states else self.report())
        elif isinstance(ask, GatewayAlive):
            self.alive.append(ask)
        elif isinstance(ask, Holding):
            self.told.append(ask)
        elif isinstance(ask, Cordon):
            self.draining = ask.on
            self.announce()
            reply(self.report())


def refuse(
    outcome: Outcome, *, elsewhere: bool = False, retry_after_s: float | None = None, message: str = "no"
) -> Script:
    """Answer an ``Acquire`` with a refusal."""

    def script(sidecar: StubSidecar, ask: Acquire, reply: Reply[AnswerOfNode]) -> None:
        reply(
            Refused(lease=ask.lease, outcome=outcome, message=message, retry_after_s=retry_after_s, elsewhere=elsewhere)
        )

    return script


def keep_waiting(sidecar: StubSidecar, ask: Acquire, reply: Reply[AnswerOfNode]) -> None:
    """No answer: a load that takes for ever."""


def grant_after_a_load(sidecar: StubSidecar, ask: Acquire, reply: Reply[AnswerOfNode]) -> None:
    """A grant that says that it had to wait."""
    sidecar.grant(ask, reply, waited=True)
