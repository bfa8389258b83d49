"""Engines that come and go: what their slots, leases and loads become."""

from __future__ import annotations

from catalog.names import split_adapter_name
from wire.outcomes import Outcome

from .admission import Load, Stage
from .calls import EngineCalls
from .events import Cordoned, EngineDown, EngineRemarked, EngineUp
from .loads import Loads
from .resync import Resync
from .slots import Call, CallKind, Engine, Slot, SlotState
from .state import NodeState
from .waiters import WaitingRoom

# a call of an earlier sidecar may still have been under way when its engine was adopted
FIRST_LOOK_S = 5.0


class Lifecycle:
    """Applies what is told of whole engines."""

    def __init__(
        self, state: NodeState, calls: EngineCalls, loads: Loads, waiters: WaitingRoom, resync: Resync
    ) -> None:
        self._state = state
        self._resync = resync
        self._calls = calls
        self._loads = loads
        self._waiters = waiters

    def engine_up(self, event: EngineUp, now: float) -> None:
        """Take the engine as it is: adapters that are ours by name serve, others only occupy their slots."""
        engine = self._state.engines[event.engine]
        engine.ready_with(event.limits, event.host, event.port, event.token)
        self._state.engines_changed()
        engine.pid, engine.since = event.pid, event.at
        engine.count_foreign(event.installed)
        for name in sorted(event.installed):
            ours = split_adapter_name(name)
            if ours is not None:
                self._adopt(engine, name, ours[1], now)
        lost, engine.lost = engine.lost, []
        for slot in lost[: engine.free_slots]:
            entry = self._state.cache.get(slot.digest)
            if entry is not None and entry.ready and slot.adapter not in engine.slots:
                self._loads.restore(engine, slot.adapter, slot.digest, entry.extent.length, slot.rank, now)
        engine.read_at = now + FIRST_LOOK_S
        self._state.changes.engines.add(engine.name)

    def engine_down(self, event: EngineDown, now: float) -> None:
        """Its slots are empty and its leases void. Loads wait for another engine of the base, if one is ready."""
        engine = self._state.engines[event.engine]
        was_ready = engine.ready
        under_way = self._calls.abandon(engine)
        void = self._state.leases.drop_engine(engine.name)
        self._state.counts["leases_void"] += len(void)
        self._state.end_leases(void, now, lost=False)
        self._empty(engine)
        engine.down(event.health, event.detail)
        self._state.engines_changed()
        engine.since = event.at
        self._state.changes.engines.add(engine.name)
        if not was_ready:
            return
        self._state.counts["engine_deaths"] += 1
        for load in self._state.queue.still(self._state.queue):
            if load.engine == engine.name:
                self._lost_its_engine(load, engine, under_way, now)
        if not any(other.ready for other in self._state.by_base[engine.base]):
            self._refuse_all(engine, now)

    def cordoned(self, event: Cordoned, now: float) -> None:
        """Out of service, leases and loads under way go on; what has not begun is for another node to do."""
        self._state.cordoned = event.on
        self._state.changes.loads = True
        if event.on:
            self._loads.refuse_waiting(Outcome.NO_HEALTHY_NODE, self._state.cordon_message, now)

    def engine_remarked(self, event: EngineRemarked, now: float) -> None:
        engine = self._state.engines[event.engine]
        if engine.ready:
            engine.detail = event.detail
            self._state.changes.engines.add(engine.name)

    def _adopt(self, engine: Engine, adapter: str, digest: str, now: float) -> None:
        slot = engine.slots[adapter] = Slot(adapter, digest, 0, SlotState.SERVING, used_at=now)
        if engine.limits is not None and not engine.limits.removes_for_real:
            self._resync.hold(engine, slot, now)
        self._loads.serve(engine, slot, now)

    def _empty(self, engine: Engine) -> None:
        for slot in engine.slots.values():
            self._state.cache.unpin(slot.digest, ("unsure", engine.name, slot.adapter))
            self._state.digest_changed(slot.digest)

    def _lost_its_engine(self, load: Load, engine: Engine, under_way: Call | None, now: float) -> None:
        """A load goes on, on another engine. One whose install was under way may be what killed it, and is not tried
        on this one for a while."""
        if load.stage is Stage.FETCHING:
            load.engine = ""
            return
        suspect = under_way is not None and under_way.kind is CallKind.INSTALL and under_way.adapter == load.adapter
        if load.stage is Stage.INSTALLING and suspect:
            message = "the engine failed while it loaded this adapter; trying again may help"
            self._state.broke(engine, load.digest, message, now)
            self._loads.try_others(load, now, Outcome.ENGINE_FAILED, message)
        else:
            self._loads.bounce(load, now)

    def _refuse_all(self, engine: Engine, now: float) -> None:
        queue = self._state.queue
        for load in queue.still(load for load in queue if load.base == engine.base):
            self._waiters.refuse(
                load,
                Outcome.NO_HEALTHY_NODE,
                f"the engine of base {engine.base} failed while this waited; trying again may help",
                elsewhere=True,
            )
            self._loads.give_up_unwanted(load, now)
