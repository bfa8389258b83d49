"""A node's world as a state machine: engines, fetches, gateways and time, whose moves hypothesis chooses."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from backends.interface import EngineSettings, Health, Removal
from catalog.names import adapter_name
from sidecar.effects import (
    Answer,
    AnyEffect,
    CancelFetch,
    ClearExtent,
    ReadInstalled,
    StartFetch,
    StartInstall,
    StartRemove,
)
from sidecar.events import (
    AnyEvent,
    Asked,
    Cordoned,
    EngineDown,
    EngineUp,
    FetchCancelled,
    FetchDone,
    FetchFailed,
    FetchOverdue,
    GatewayHeard,
    GatewayHolds,
    InstallBroke,
    InstallDone,
    InstalledRead,
    InstallRejected,
    InstallUnsure,
    Released,
    RemoveDone,
    RemoveUnsure,
    RevisionOffered,
    Tick,
)
from sidecar.extents import Extent
from sidecar.machine import Machine
from sidecar.report import residencies
from sidecar.state import Changes
from wire.node import Acquire, Granted, HeldLease, Holding, Residency
from wire.outcomes import Outcome

from .bench import BASE, digest, limits, settings

ENGINES = ("e1", "e2")
SLOTS = 2
GATEWAYS = ("g1", "g2")
ADAPTERS = st.integers(0, 4)
# mostly one, so that its loads compete
TENANTS = ("t", "t", "u")
# mostly one that fits
RANKS = (8, 8, 8, 8, 8, 99)
ENDINGS = ("done", "done", "done", "done", "rejected", "broke", "unsure")
CALLS_AT_ONCE = {"e1": 1, "e2": 3}
BACKENDS = {"e1": "vllm", "e2": "sglang"}
# mostly what both can be asked
NOT_BY = ("", "", "", "sglang")
EngineEffect = StartInstall | StartRemove | ReadInstalled


class EngineModel:
    """A real engine keeps what it was given, refuses to drop what is in use, and never holds more than its slots."""

    def __init__(self) -> None:
        self.up = False
        self.adapters: set[str] = set()
        self.calls: list[EngineEffect] = []


CONFIG = settings(
    engines=tuple(EngineSettings(name=name, base=BASE, fingerprint="f", backend=BACKENDS[name]) for name in ENGINES),
    arena_bytes=3 * 12_288,
    loads_in_flight_min=1,
    loads_in_flight=2,
    loads_queued=3,
    loads_queued_per_tenant=2,
    waiters_per_load=3,
    gateway_silence_s=15.0,
    slot_age_bound_s=3.0,
    min_residency_s=1.0,
    negative_max_s=4.0,
    tenant_loads_per_s=1.0,
)


class NodeModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine(CONFIG)
        self.now = 100.0
        self.engines = {name: EngineModel() for name in ENGINES}
        self.orphans: list[EngineEffect] = []
        self.fetches: dict[str, StartFetch] = {}
        self.extents: dict[str, tuple[int, int]] = {}
        self.cancelled: set[int] = set()
        self.unanswered: set[int] = set()
        self.asks = 0
        # what gateways believe to hold: (gateway, lease) -> (engine, adapter)
        self.held: dict[tuple[str, int], tuple[str, str]] = {}
        self.requests: dict[int, Acquire] = {}
        self.lives: Counter[str] = Counter()
        self.cordoned = False
        # what gateways know from the reports
        self.told: dict[str, Residency] = {}

    # performing effects

    def send(self, event: AnyEvent) -> None:
        for effect in self.machine.handle(event, self.now):
            self.perform(effect)
        state = self.machine.state
        if state.changes:
            self.told.update(residencies(state, state.changes.digests))
            state.changes = Changes()

    def perform(self, effect: AnyEffect) -> None:
        if isinstance(effect, Answer):
            self.unanswered.remove(effect.ask)
            request = self.requests.pop(effect.ask)
            if isinstance(effect.answer, Granted):
                assert not self.cordoned or effect.answer.waited or self.asked_before(request), "granted while cordoned"
                model = self.engines[effect.answer.engine]
                assert model.up, "granted on an engine that is down"
                assert effect.answer.backend == BACKENDS[effect.answer.engine] != request.not_by, "granted in vain"
                if request.digest:
                    assert effect.answer.adapter == adapter_name(request.tenant, request.digest)
                    assert effect.answer.adapter in model.adapters, "granted where it does not serve"
                adapter = effect.answer.adapter if request.digest else ""
                self.held[request.gateway, request.lease] = effect.answer.engine, adapter
        elif isinstance(effect, StartFetch):
            assert effect.digest not in self.fetches, "one fetch at a time for a digest"
            self.fetches[effect.digest] = effect
            self.place(effect.digest, effect.extent)
        elif isinstance(effect, CancelFetch):
            assert self.fetches[effect.digest].extent.generation == effect.generation
            assert effect.generation not in self.cancelled, "told to end once"
            self.cancelled.add(effect.generation)
        elif isinstance(effect, ClearExtent):
            self.clear(effect)
        else:
            model = self.engines[effect.engine]
            assert model.up
            if isinstance(effect, StartRemove):
                leased = {(lease.engine, lease.adapter) for lease in self.machine.state.leases}
                assert (effect.engine, effect.adapter) not in leased, "removes what is leased"
            model.calls.append(effect)
            assert len(model.calls) <= CALLS_AT_ONCE[effect.engine], "more calls than the engine takes"
            reads = any(isinstance(call, ReadInstalled) for call in model.calls)
            assert len(model.calls) == 1 or not reads, "read while something changes"

    def asked_before(self, request: Acquire) -> bool:
        return (request.gateway, request.lease) in self.held

    def place(self, name: str, extent: Extent) -> None:
        start, end = extent.offset, extent.offset + extent.length
        for other, (from_, to) in self.extents.items():
            assert end <= from_ or to <= start, f"overwrites the bytes of {other}"
        self.extents[name] = start, end

    def clear(self, effect: ClearExtent) -> None:
        assert effect.digest not in self.fetches, "evicted while it is fetched"
        installing = {call.digest for call in self.under_way() if isinstance(call, StartInstall)}
        assert effect.digest not in installing, "evicted while an engine reads it"
        del self.extents[effect.digest]

    def under_way(self) -> list[EngineEffect]:
        return [call for model in self.engines.values() for call in model.calls] + self.orphans

    def in_use(self, engine: str, adapter: str) -> bool:
        return (engine, adapter) in self.held.values()

    # the world's moves

    @initialize()
    def start(self) -> None:
        self.boot("e1", frozenset())

    def boot(self, engine: str, installed: frozenset[str]) -> None:
        model = self.engines[engine]
        model.up, model.adapters = True, set(installed)
        can = limits(SLOTS, calls_at_once=CALLS_AT_ONCE[engine])
        self.send(EngineUp(engine=engine, limits=can, installed=installed, host="h", port=1))

    @rule(
        number=st.none() | ADAPTERS,
        gateway=st.sampled_from(GATEWAYS),
        wait=st.floats(0, 30),
        rank=st.sampled_from(RANKS),
        tenant=st.sampled_from(TENANTS),
        not_by=st.sampled_from(NOT_BY),
    )
    def ask(self, number: int | None, gateway: str, wait: float, rank: int, tenant: str, not_by: str = "") -> None:
        self.asks += 1
        self.request(gateway, self.asks, number, wait, rank, tenant, not_by)

    @rule(number=ADAPTERS, gateway=st.sampled_from(GATEWAYS))
    def ask_and_load(self, number: int, gateway: str) -> None:
        """The usual case, without which few histories would ever fill a slot."""
        self.ask(number, gateway, 30.0, 8, TENANTS[0])
        for _ in range(3):
            self.the_world_works()

    @rule(gateway=st.sampled_from(GATEWAYS), returning=st.integers(0, 3), on=st.booleans())
    def newcomer_waits_for_a_busy_slot(self, gateway: str, returning: int, on: bool) -> None:
        """Past the age bound one is kept for it, and who comes back to what serves there waits beside it."""
        for number in range(SLOTS * sum(model.up for model in self.engines.values())):
            self.ask_and_load(number, gateway)
        self.ask(4, gateway, 30.0, 8, TENANTS[0])
        for _ in range(8):
            self.sign_of_life(gateway)
            self.time_passes(0.5, 1)
        self.ask(returning, gateway, 30.0, 8, TENANTS[0])
        self.cordon(on)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        number = int(request.digest, 16) if request.digest else None
        self.asks += 1
        self.request(request.gateway, request.lease, number, 10.0, request.rank, request.tenant, request.not_by)

    def request(
        self, gateway: str, lease: int, number: int | None, wait: float, rank: int, tenant: str, not_by: str
    ) -> None:
        request = Acquire(
            gateway=gateway,
            instance=self.life_of(gateway),
            lease=lease,
            base=BASE,
            tenant=tenant,
            policy="" if number is None else f"t/p{number % 2}",
            digest="" if number is None else digest(number),
            size=10_000,
            rank=rank,
            not_by=not_by,
            ttl_s=20.0,
        )
        ask = self.asks
        self.unanswered.add(ask)
        self.requests[ask] = request
        self.send(Asked(ask=ask, request=request, deadline=self.now + wait))

    @precondition(lambda self: self.asks)
    @rule(data=st.data(), gateway=st.sampled_from(GATEWAYS))
    def release(self, data: st.DataObject, gateway: str) -> None:
        lease = data.draw(st.integers(1, self.asks))
        self.held.pop((gateway, lease), None)
        self.send(Released(gateway=gateway, instance=self.life_of(gateway), leases=(lease,)))

    @rule(gateway=st.sampled_from(GATEWAYS))
    def sign_of_life(self, gateway: str) -> None:
        self.send(GatewayHeard(gateway=gateway, instance=self.life_of(gateway)))

    def life_of(self, gateway: str) -> str:
        return f"life {self.lives[gateway]}"

    @rule(gateway=st.sampled_from(GATEWAYS))
    def gateway_restarts(self, gateway: str) -> None:
        self.sign_of_life(gateway)
        self.lives[gateway] += 1
        self.held = {key: where for key, where in self.held.items() if key[0] != gateway}
        self.sign_of_life(gateway)
        assert not any(self.requests[ask].gateway == gateway for ask in self.unanswered)
        assert not any(lease.gateway == gateway for lease in self.machine.state.leases)

    # both sides lose their memory

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_is_lost(self, data: st.DataObject) -> None:
        del self.held[data.draw(st.sampled_from(sorted(self.held)))]

    @rule(gateway=st.sampled_from(GATEWAYS))
    def gateway_says_what_it_holds(self, gateway: str) -> None:
        held = {lease: where for (name, lease), where in self.held.items() if name == gateway}
        asked = {request.lease for request in self.requests.values() if request.gateway == gateway}
        there = {lease for lease, (engine, adapter) in held.items() if self.leasable(engine, adapter)}
        leases = tuple(HeldLease(lease, *where, ttl_s=20.0) for lease, where in held.items())
        instance = self.life_of(gateway)
        holding = Holding(gateway=gateway, instance=instance, leases=leases, asked=tuple(asked), newest=self.asks)
        self.send(GatewayHolds(holding=holding))
        counted = {lease.lease for lease in self.machine.state.leases if lease.gateway == gateway}
        assert counted <= held.keys(), "counts what was given back"
        assert counted >= there, "does not count what is held"

    def leasable(self, engine: str, adapter: str) -> bool:
        known = self.machine.state.engines[engine]
        return known.ready and (not adapter or known.leasable(adapter))

    @rule()
    def sidecar_restarts(self) -> None:
        """Nothing of it is left but its engines, with what they have; calls under way end for nobody."""
        for name, model in self.engines.items():
            for call in model.calls:
                if isinstance(call, StartInstall) and len(model.adapters) < SLOTS:
                    model.adapters.add(call.adapter)
                elif isinstance(call, StartRemove) and not self.in_use(name, call.adapter):
                    model.adapters.discard(call.adapter)
            model.calls = []
        self.machine = Machine(CONFIG)
        for known in (
            self.orphans, self.fetches, self.extents, self.cancelled, self.unanswered, self.requests, self.told,
        ):  # fmt: skip
            known.clear()
        if self.cordoned:
            self.send(Cordoned(on=True))
        for name in ENGINES:
            if self.engines[name].up:
                self.boot(name, frozenset(self.engines[name].adapters))

    @rule(on=st.sampled_from((True, False, False)))
    def cordon(self, on: bool) -> None:
        self.cordoned = on
        self.send(Cordoned(on=on))
        if on:
            assert self.machine.state.queue.queued == 0

    @rule(number=ADAPTERS)
    def offer(self, number: int) -> None:
        self.send(RevisionOffered(policy=f"t/p{number % 2}", digest=digest(number), size=10_000))

    @rule(seconds=st.floats(0.05, 1.0), times=st.integers(1, 8))
    def time_passes(self, seconds: float, times: int) -> None:
        for _ in range(times):
            self.now += seconds
            self.send(Tick())

    @precondition(lambda self: self.fetches)
    @rule(data=st.data(), works=st.booleans())
    def fetch_ends(self, data: st.DataObject, works: bool) -> None:
        fetch = self.fetches.pop(data.draw(st.sampled_from(sorted(self.fetches))))
        generation = fetch.extent.generation
        if generation in self.cancelled and data.draw(st.booleans()):
            self.cancelled_fetch_ends(fetch)
            return
        if works:
            self.send(FetchDone(digest=fetch.digest, generation=generation))
            return
        del self.extents[fetch.digest]
        failed = FetchFailed(
            digest=fetch.digest, generation=generation, outcome=Outcome.ARTIFACT_UNAVAILABLE, message="m"
        )
        self.send(failed)

    def cancelled_fetch_ends(self, fetch: StartFetch) -> None:
        del self.extents[fetch.digest]
        self.send(FetchCancelled(digest=fetch.digest, generation=fetch.extent.generation))

    @precondition(lambda self: self.fetches)
    @rule(data=st.data())
    def fetch_hangs(self, data: st.DataObject) -> None:
        fetch = self.fetches[data.draw(st.sampled_from(sorted(self.fetches)))]
        self.send(FetchOverdue(digest=fetch.digest, generation=fetch.extent.generation, message="m"))

    @precondition(lambda self: any(model.calls for model in self.engines.values()))
    @rule(data=st.data(), ending=st.sampled_from(ENDINGS), happened=st.booleans())
    def call_ends(self, data: st.DataObject, ending: str, happened: bool) -> None:
        engine = data.draw(st.sampled_from([name for name, model in self.engines.items() if model.calls]))
        model = self.engines[engine]
        call = model.calls.pop(data.draw(st.integers(0, len(model.calls) - 1)))
        if isinstance(call, StartInstall):
            self.install_ends(model, call, ending, happened)
        elif isinstance(call, StartRemove):
            self.removal_ends(model, call, ending, happened)
        else:
            names = None if ending == "unsure" else frozenset(model.adapters)
            self.send(InstalledRead(engine=engine, op=call.op, names=names))

    def install_ends(self, model: EngineModel, call: StartInstall, ending: str, happened: bool) -> None:
        if ending == "done" or (ending == "unsure" and happened):
            model.adapters.add(call.adapter)
            assert len(model.adapters) <= SLOTS, "more adapters than slots"
        events: dict[str, AnyEvent] = {
            "done": InstallDone(engine=call.engine, op=call.op),
            "rejected": InstallRejected(engine=call.engine, op=call.op, message="m"),
            "broke": InstallBroke(engine=call.engine, op=call.op, message="m"),
            "unsure": InstallUnsure(engine=call.engine, op=call.op, message="m"),
        }
        if ending in ("rejected", "broke") and call.adapter in model.adapters:
            # it was there already, from a call whose answer was lost
            ending = "done"
        self.send(events[ending])

    def removal_ends(self, model: EngineModel, call: StartRemove, ending: str, happened: bool) -> None:
        if ending == "unsure":
            if happened and not self.in_use(call.engine, call.adapter):
                model.adapters.discard(call.adapter)
            self.send(RemoveUnsure(engine=call.engine, op=call.op, message="m"))
            return
        removal = Removal.REMOVED if call.adapter in model.adapters else Removal.ABSENT
        if self.in_use(call.engine, call.adapter) or ending == "broke":
            removal = Removal.BUSY if removal is Removal.REMOVED else removal
        if removal is not Removal.BUSY:
            model.adapters.discard(call.adapter)
        self.send(RemoveDone(engine=call.engine, op=call.op, removal=removal))

    @rule(engine=st.sampled_from(ENGINES), adopt=st.sets(ADAPTERS, max_size=SLOTS))
    def engine_dies_or_returns(self, engine: str, adopt: set[int]) -> None:
        model = self.engines[engine]
        if not model.up:
            self.boot(engine, frozenset(adapter_name("t", digest(number)) for number in adopt))
            return
        model.up, model.adapters = False, set()
        self.orphans += model.calls
        model.calls = []
        self.held = {key: where for key, where in self.held.items() if where[0] != engine}
        self.send(EngineDown(engine=engine, health=Health.DEAD, detail="killed"))

    @precondition(lambda self: self.orphans)
    @rule()
    def late_call_ends(self) -> None:
        call = self.orphans.pop()
        ended: AnyEvent
        if isinstance(call, StartInstall):
            ended = InstallUnsure(engine=call.engine, op=call.op, message="m")
        elif isinstance(call, StartRemove):
            ended = RemoveUnsure(engine=call.engine, op=call.op, message="m")
        else:
            ended = InstalledRead(engine=call.engine, op=call.op, names=None)
        self.send(ended)

    def the_world_works(self) -> None:
        for fetched in list(self.fetches):
            fetch = self.fetches.pop(fetched)
            if fetch.extent.generation in self.cancelled:
                self.cancelled_fetch_ends(fetch)
            else:
                self.send(FetchDone(digest=fetched, generation=fetch.extent.generation))
        for engine in ENGINES:
            if self.engines[engine].calls:
                self.call_ends_well(engine)

    def call_ends_well(self, engine: str) -> None:
        model = self.engines[engine]
        call = model.calls.pop(0)
        if isinstance(call, StartInstall):
            self.install_ends(model, call, "done", True)
        elif isinstance(call, StartRemove):
            self.removal_ends(model, call, "done", True)
        else:
            self.send(InstalledRead(engine=engine, op=call.op, names=frozenset(model.adapters)))
