"""A node without a world: the machine, a clock that the test moves, and everything it asked for so far."""

from __future__ import annotations

from backends.interface import EngineLimits, EngineSettings, Health, Removal
from catalog.names import adapter_name
from sidecar.audit import audit
from sidecar.effects import (
    Answer,
    AnyEffect,
    CancelFetch,
    CancelPull,
    ClearExtent,
    EngineCall,
    ReadInstalled,
    StartFetch,
    StartInstall,
    StartPull,
    StartRemove,
)
from sidecar.events import (
    AnyEvent,
    Asked,
    EngineDown,
    EngineUp,
    FetchCancelled,
    FetchDone,
    FetchFailed,
    FetchOverdue,
    GatewayHeard,
    InstallBroke,
    InstallDone,
    InstalledRead,
    InstallRejected,
    InstallUnsure,
    Released,
    RemoveDone,
    RemoveUnsure,
    Tick,
)
from sidecar.machine import Machine
from sidecar.settings import SidecarSettings
from wire.node import Acquire, Granted, Refused
from wire.outcomes import Outcome
from wire.peers import Peer

BASE = "base-a"
TENANT = "acme"
SIZE = 10_000


def digest(number: int) -> str:
    return f"{number:064x}"


def name(number: int, tenant: str = TENANT) -> str:
    return adapter_name(tenant, digest(number))


def limits(
    slots: int = 2, max_rank: int = 16, *, removes_for_real: bool = True, serves_base: bool = True,
    calls_at_once: int = 1,
) -> EngineLimits:  # fmt: skip
    return EngineLimits(
        slots=slots,
        max_rank=max_rank,
        targets=("q", "v"),
        served_base=BASE,
        dtype="float32",
        removes_for_real=removes_for_real,
        serves_base=serves_base,
        calls_at_once=calls_at_once,
    )


def settings(engine_count: int = 1, **changes: object) -> SidecarSettings:
    values: dict[str, object] = {
        "node": "n1",
        "endpoint": "ipc:///nowhere/node",
        "feed_endpoint": "ipc:///nowhere/feed",
        "store_dir": "/nowhere/store",
        "run_dir": "/nowhere/run",
        "log_dir": "/nowhere/log",
        "engines": tuple(
            EngineSettings(name=f"e{number}", base=BASE, fingerprint="f") for number in range(1, engine_count + 1)
        ),
        "arena_bytes": 1 << 20,
        "loads_in_flight": 2,
    }
    values.update(changes)
    # a limit that adapts has tests of its own, and so have a tenant's pace and a queue that widens
    values.setdefault("loads_in_flight_min", values["loads_in_flight"])
    if "tenant_loads_per_s" not in values:
        values |= {"tenant_loads_per_s": 1e6, "tenant_loads_share": 1e6}
    values.setdefault("loads_queued_s", 0.0)
    return SidecarSettings(**values)  # type: ignore[arg-type]


class Bench:
    """``answers`` by ask; ``fetches``, ``pulls`` and ``calls`` are under way, by digest, by transfer and by engine."""

    def __init__(self, engines: int = 1, slots: int = 2, *, up: bool = True, **changes: object) -> None:
        self.machine = Machine(settings(engines, **changes))
        self.now = 1000.0
        self.answers: dict[int, Granted | Refused] = {}
        self.fetches: dict[str, StartFetch] = {}
        self.pulls: dict[str, StartPull] = {}
        self.calls: dict[str, EngineCall] = {}
        self.history: list[AnyEffect] = []
        self._asks = 0
        if up:
            for number in range(1, engines + 1):
                self.up(f"e{number}", slots=slots)

    # events

    def send(self, event: AnyEvent) -> list[AnyEffect]:
        effects = self.machine.handle(event, self.now)
        for effect in effects:
            self._note(effect)
        assert audit(self.machine.state) == []
        return effects

    def ask(
        self,
        number: int | None,
        *,
        lease: int | None = None,
        gateway: str = "g1",
        instance: str = "i1",
        tenant: str = TENANT,
        base: str = BASE,
        wait_s: float = 60.0,
        rank: int = 8,
        size: int = SIZE,
        ttl_s: float = 600.0,
        peers: tuple[Peer, ...] = (),
        failed_engine: str = "",
        not_by: str = "",
    ) -> int:
        """Ask for adapter ``number`` (None: the base); the ask, which is also the lease unless one is given."""
        self._asks += 1
        request = Acquire(
            gateway=gateway,
            instance=instance,
            lease=self._asks if lease is None else lease,
            base=base,
            tenant=tenant,
            policy=f"{tenant}/p",
            digest="" if number is None else digest(number),
            size=size,
            rank=rank,
            ttl_s=ttl_s,
            peers=peers,
            failed_engine=failed_engine,
            not_by=not_by,
        )
        self.send(Asked(ask=self._asks, request=request, deadline=self.now + wait_s))
        return self._asks

    def release(self, *leases: int, gateway: str = "g1", instance: str = "i1") -> None:
        self.send(Released(gateway=gateway, instance=instance, leases=leases))

    def alive(self, gateway: str = "g1", instance: str = "i1") -> None:
        self.send(GatewayHeard(gateway=gateway, instance=instance))

    def wait(self, seconds: float, *, step: float = 0.5) -> None:
        """Let time pass, ticking."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            self.send(Tick())
            self._answer_comparisons()

    def up(
        self,
        engine: str = "e1",
        *,
        slots: int = 2,
        installed: tuple[str, ...] = (),
        max_rank: int = 16,
        removes_for_real: bool = True,
        token: str = "",
        serves_base: bool = True,
    ) -> None:
        self.send(
            EngineUp(
                engine=engine,
                limits=limits(slots, max_rank, removes_for_real=removes_for_real, serves_base=serves_base),
                installed=frozenset(installed),
                host="127.0.0.1",
                port=8000 + int(engine[1:]),
                token=token,
            )
        )

    def down(self, engine: str = "e1") -> None:
        self.calls.pop(engine, None)
        self.send(EngineDown(engine=engine, health=Health.DEAD, detail="killed"))

    def fetched(self, number: int) -> None:
        fetch = self.fetches.pop(digest(number))
        self.send(FetchDone(digest=fetch.digest, generation=fetch.extent.generation))

    def fetch_overdue(self, number: int) -> None:
        fetch = self.fetches[digest(number)]
        self.send(FetchOverdue(digest=fetch.digest, generation=fetch.extent.generation, message="storage hangs"))

    def fetch_cancelled(self, number: int) -> None:
        fetch = self.fetches.pop(digest(number))
        assert CancelFetch(digest=fetch.digest, generation=fetch.extent.generation) in self.history
        self.send(FetchCancelled(digest=fetch.digest, generation=fetch.extent.generation))

    def fetch_failed(self, number: int, outcome: Outcome = Outcome.ARTIFACT_UNAVAILABLE) -> None:
        fetch = self.fetches.pop(digest(number))
        failed = FetchFailed(
            digest=fetch.digest, generation=fetch.extent.generation, outcome=outcome, message="no such file"
        )
        self.send(failed)

    def installed(self, number: int, engine: str = "e1", tenant: str = TENANT) -> None:
        self.send(InstallDone(engine=engine, op=self.install_of(number, engine, tenant).op))

    def loaded(self, number: int, engine: str = "e1", tenant: str = TENANT) -> None:
        """Its bytes have come, and the engine has it."""
        self.fetched(number)
        self.installed(number, engine, tenant)

    def rejected(self, number: int, engine: str = "e1") -> None:
        self.send(InstallRejected(engine=engine, op=self.install_of(number, engine).op, message="wrong shape"))

    def broke(self, number: int, engine: str = "e1") -> None:
        self.send(InstallBroke(engine=engine, op=self.install_of(number, engine).op, message="no memory"))

    def unsure(self, number: int, engine: str = "e1") -> None:
        self.send(InstallUnsure(engine=engine, op=self.install_of(number, engine).op, message="no answer"))

    def removed(self, number: int, engine: str = "e1", removal: Removal = Removal.REMOVED) -> None:
        call = self.calls.pop(engine)
        assert isinstance(call, StartRemove)
        assert call.adapter == name(number)
        self.send(RemoveDone(engine=engine, op=call.op, removal=removal))

    def remove_unsure(self, number: int, engine: str = "e1") -> None:
        call = self.calls.pop(engine)
        assert isinstance(call, StartRemove)
        assert call.adapter == name(number)
        self.send(RemoveUnsure(engine=engine, op=call.op, message="no answer"))

    def read(self, names: set[str], engine: str = "e1") -> None:
        call = self.calls.pop(engine)
        assert isinstance(call, ReadInstalled)
        self.send(InstalledRead(engine=engine, op=call.op, names=frozenset(names)))

    # what came of them

    def install_of(self, number: int, engine: str = "e1", tenant: str = TENANT) -> StartInstall:
        call = self.calls.pop(engine)
        assert isinstance(call, StartInstall)
        assert call.adapter == name(number, tenant)
        return call

    def serve(self, number: int, engine: str = "e1") -> int:
        """Ask for a cold adapter and bring it to serving; the lease, which is held."""
        ask = self.ask(number)
        if digest(number) in self.fetches:
            self.fetched(number)
        self.installed(number, engine)
        assert self.granted(ask).engine == engine
        return ask

    def removing(self, engine: str = "e1") -> str:
        """The adapter that is being removed."""
        call = self.calls[engine]
        assert isinstance(call, StartRemove)
        return call.adapter

    def granted(self, ask: int) -> Granted:
        answer = self.answers[ask]
        assert isinstance(answer, Granted), answer
        return answer

    def refused(self, ask: int) -> Refused:
        answer = self.answers[ask]
        assert isinstance(answer, Refused), answer
        return answer

    def started(self, kind: type[AnyEffect]) -> list[AnyEffect]:
        return [effect for effect in self.history if isinstance(effect, kind)]

    def serving(self, engine: str = "e1") -> set[str]:
        known = self.machine.state.engines[engine]
        return {adapter for adapter in known.slots if known.serving(adapter)}

    def _answer_comparisons(self) -> None:
        """An engine that left nothing open has what we think it has, unless a test says otherwise."""
        for engine, call in list(self.calls.items()):
            slots = self.machine.state.engines[engine].slots
            if isinstance(call, ReadInstalled) and not any(slot.unsure for slot in slots.values()):
                self.read(set(slots), engine)

    def _note(self, effect: AnyEffect) -> None:
        self.history.append(effect)
        if isinstance(effect, Answer):
            assert effect.ask not in self.answers, "an ask was answered twice"
            self.answers[effect.ask] = effect.answer
        elif isinstance(effect, StartFetch):
            assert effect.digest not in self.fetches, "fetched twice at once"
            self.fetches[effect.digest] = effect
        elif isinstance(effect, StartPull):
            assert effect.transfer not in self.pulls, "pulled twice at once"
            self.pulls[effect.transfer] = effect
        elif isinstance(effect, EngineCall):
            assert effect.engine not in self.calls, "two calls at once"
            self.calls[effect.engine] = effect
        else:
            assert isinstance(effect, ClearExtent | CancelFetch | CancelPull)
