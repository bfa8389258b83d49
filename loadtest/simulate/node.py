"""A node: one sidecar's process and its engines' processes, each of which may die alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from backends.interface import EngineBackend, EngineSettings
from gateway.settings import NodeAddress
from sidecar.arena import Arena
from sidecar.audit import audit
from sidecar.fetch import Fetcher
from sidecar.machine import Machine
from sidecar.service import Sidecar, Storage
from sidecar.settings import SidecarSettings
from wire.node import Acquire, AskOfNode, Refused

from .backend import EngineProcess, ModelBackend
from .catalog import BASE, FINGERPRINT
from .constants import EngineConstants
from .network import Network
from .sockets import sockets
from .storage import ArtifactStore, MemoryArena, MemoryFetcher, MemoryMark

ENGINE_PORT = 8000

Refuse = Callable[[Machine, Acquire], Refused | None]


def node_settings(
    name: str, *, slots: int, base: str = BASE, fingerprint: str = FINGERPRINT, **changes: object
) -> SidecarSettings:
    """Settings of a sidecar with one engine of ``slots``; ``changes`` are fields of the settings."""
    engine = EngineSettings(
        name=f"{name}-e0", base=base, fingerprint=fingerprint, host=name, port=ENGINE_PORT, slots=slots
    )
    values: dict[str, object] = {
        "node": name,
        "endpoint": f"memory://{name}/asks",
        "feed_endpoint": f"memory://{name}/feed",
        "store_dir": "/nowhere",
        "run_dir": "/nowhere",
        "log_dir": "/nowhere",
        "engines": (engine,),
    }
    return SidecarSettings(**{**values, **changes})  # type: ignore[arg-type]


class NodeProcesses:
    """``name`` is the host's. Starts with its engines up and its sidecar serving once ``start`` was called."""

    def __init__(
        self,
        settings: SidecarSettings,
        network: Network,
        store: ArtifactStore,
        constants: EngineConstants,
        *,
        stock: bool = False,
        refuse: Refuse | None = None,
    ) -> None:
        """``refuse`` may answer an acquire in the sidecar's place: another system's admission."""
        self.name = settings.node
        self.settings = settings
        self.engines = {engine.name: EngineProcess(engine, constants, stock=stock) for engine in settings.engines}
        self.sidecar: Sidecar | None = None
        self.findings: list[str] = []
        self._counts: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self._network = network
        self._refuse = refuse
        self._store = store
        self._mark = MemoryMark()
        self._serving: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._arena: MemoryArena | None = None

    @property
    def address(self) -> NodeAddress:
        return NodeAddress(self.name, self.settings.endpoint, self.settings.feed_endpoint)

    def start(self) -> None:
        """Start the sidecar; it starts or adopts its engines."""
        if self.sidecar is not None:
            raise RuntimeError(f"the sidecar of {self.name} runs already")
        self._stop = asyncio.Event()
        backends: dict[str, EngineBackend] = {name: ModelBackend(engine) for name, engine in self.engines.items()}
        made = sockets(self._network, self.name)
        if self._refuse is not None:
            made = made._replace(responder=self._refusing(made.responder, self._refuse))
        self.sidecar = Sidecar(self.settings, backends, sockets=made, storage=self._storage, mark=self._mark)
        self._serving = asyncio.get_running_loop().create_task(self._serve(self.sidecar))

    def kill_sidecar(self) -> None:
        """Nobody hears of it but by broken connections. Its engines go on, with what they were told."""
        sidecar, self.sidecar = self.sidecar, None
        if sidecar is not None and self._serving is not None:
            self.note(sidecar)
            for endpoint in (self.settings.endpoint, self.settings.feed_endpoint):
                self._network.withdraw(endpoint)
            self._serving.cancel()

    def kill_engine(self) -> None:
        for engine in self.engines.values():
            engine.kill()

    def note(self, sidecar: Sidecar) -> None:
        """Keep what a sidecar's life counted, and what was wrong with its books."""
        self.findings += audit(sidecar.machine.state)
        self._counts.update(sidecar.machine.state.counts)
        if self._arena is not None:
            self.findings += self._arena.broken

    def count(self, what: str) -> int:
        """How often something happened, by the sidecar's own counting, in all its lives."""
        living = self.sidecar.machine.state.counts[what] if self.sidecar is not None else 0
        return self._counts[what] + living

    @property
    def arena(self) -> MemoryArena | None:
        return self._arena

    def _refusing(self, make: Callable[..., Any], refuse: Refuse) -> Callable[..., Any]:
        def responder(endpoint: str, asks: Any, answers: Any, handler: Callable[..., None], **options: Any) -> Any:
            def handle(ask: AskOfNode, reply: Any) -> None:
                machine = self.sidecar.machine if self.sidecar is not None else None
                refused = refuse(machine, ask) if machine is not None and isinstance(ask, Acquire) else None
                if refused is None:
                    handler(ask, reply)
                else:
                    reply(refused)

            return make(endpoint, asks, answers, handle, **options)

        return responder

    async def _serve(self, sidecar: Sidecar) -> None:
        try:
            await sidecar.run(self._stop)
        except Exception as error:
            # the process would end with this: a bug, told at the end of the run
            self.failures.append(error)
            if self.sidecar is sidecar:
                self.kill_sidecar()

    def _storage(self, settings: SidecarSettings) -> Storage:
        self._arena = MemoryArena(f"segment-of-{self.name}", settings.arena_bytes)
        fetcher = MemoryFetcher(self._store, self._arena, timeout_s=settings.load_timeout_s)
        return Storage(cast(Arena, self._arena), cast(Fetcher, fetcher))
