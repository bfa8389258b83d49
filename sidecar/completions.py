"""What follows when a fetch or an engine call ends, well, badly, or nobody knows how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backends.interface import Removal
from catalog.names import split_adapter_name
from wire.outcomes import Outcome

from .admission import Load, Stage
from .cache import Entry
from .calls import EngineCalls
from .events import (
    FetchCancelled,
    FetchDone,
    FetchFailed,
    FetchOverdue,
    InstallBroke,
    InstallDone,
    InstalledRead,
    InstallRejected,
    InstallUnsure,
    OperationEnded,
    RemoveDone,
    RemoveUnsure,
)
from .loads import Loads
from .slots import Call, Engine, Slot, SlotState
from .state import NodeState

_COMPARE_EVERY_S = 30.0
# what clients are told in place of an engine's own words, which name paths and addresses: those are in the log
_BROKE = "the engine could not load this adapter now; trying again may help"
_UNSURE = "the engine did not say whether it loaded this adapter; trying again may help"


class Completions:
    """Moves slots and loads on when what they waited for has ended."""

    def __init__(self, state: NodeState, calls: EngineCalls, loads: Loads) -> None:
        self._state = state
        self._calls = calls
        self._loads = loads
        self._by_event: dict[type[OperationEnded], Callable[[Engine, Call, Any, float], None]] = {
            InstallDone: self._install_done,
            InstallRejected: self._install_rejected,
            InstallBroke: self._install_broke,
            InstallUnsure: self._install_unsure,
            RemoveDone: self._remove_done,
            RemoveUnsure: self._remove_unsure,
            InstalledRead: self._installed_read,
        }

    # fetches

    def fetch_done(self, event: FetchDone, now: float) -> None:
        entry = self._fetched_entry(event.digest, event.generation)
        if not entry.overdue:
            self._state.queue.times.fetched(now - entry.since, entry.extent.length)
        self._state.cancelled.discard(event.digest)
        self._state.cache.completed(event.digest, now)
        self._state.counts["fetched"] += 1
        self._state.arrived_bytes[event.source] += entry.extent.length
        if event.peer:
            self._state.neighbours.answered(event.peer)
        self._state.digest_changed(event.digest)
        for load in self._state.queue.still(self._of_digest(event.digest, Stage.FETCHING)):
            self._loads.seat(load, now)

    def fetch_overdue(self, event: FetchOverdue, now: float) -> None:
        """Storage hangs: the loads end and free their permits; the extent stays until nobody writes to it."""
        self._fetched_entry(event.digest, event.generation).overdue = True
        self._state.digest_changed(event.digest)
        if self._fail_loads(event.digest, Outcome.DEADLINE, event.message, now):
            self._state.queue.timed_out()

    def fetch_failed(self, event: FetchFailed, now: float) -> None:
        was_overdue = self._fetched_entry(event.digest, event.generation).overdue
        self._state.cancelled.discard(event.digest)
        self._state.cache.discard(event.digest)
        self._state.digest_changed(event.digest)
        if was_overdue:
            # told and remembered when it was given up
            return
        self._fail_loads(event.digest, event.outcome, event.message, now)

    def fetch_cancelled(self, event: FetchCancelled, now: float) -> None:
        """Nobody's fault. Whoever came to need the bytes meanwhile has another fetch of them begun."""
        self._fetched_entry(event.digest, event.generation)
        self._state.cancelled.discard(event.digest)
        self._state.cache.discard(event.digest)
        self._state.digest_changed(event.digest)

    def _fetched_entry(self, digest: str, generation: int) -> Entry:
        entry = self._state.cache.get(digest)
        if entry is None or entry.extent.generation != generation:
            raise RuntimeError(f"a fetch into extent {generation} ended, but the extent is not {digest}'s")
        return entry

    # engine calls

    def call_ended(self, event: OperationEnded, now: float) -> None:
        engine = self._state.engines[event.engine]
        call = self._calls.ended(engine, event.op)
        if call is not None:
            self._by_event[type(event)](engine, call, event, now)
        engine.call_ended_at = now

    def _install_done(self, engine: Engine, call: Call, event: InstallDone, now: float) -> None:
        self._state.failures.forgive(call.digest)
        self._state.broken.forgive((call.digest, engine.name))
        if engine.limits is not None:
            self._state.unfit.forgive((call.digest, engine.limits))
        self._state.counts["installed"] += 1
        load = self._installing(engine, call.adapter)
        if load is not None:
            self._state.queue.times.installed(now - max(load.sent, engine.call_ended_at))
        self._loads.serve(engine, engine.slots[call.adapter], now)

    def _install_rejected(self, engine: Engine, call: Call, event: InstallRejected, now: float) -> None:
        if engine.limits is not None:
            self._state.unfit.remember((call.digest, engine.limits), event.message, now)
        load = self._vacate(engine, call)
        if load is not None:
            self._loads.try_others(load, now, Outcome.UNFIT, event.message)

    def _install_broke(self, engine: Engine, call: Call, event: InstallBroke, now: float) -> None:
        self._state.broke(engine, call.digest, _BROKE, now)
        load = self._vacate(engine, call)
        if load is not None:
            self._loads.try_others(load, now, Outcome.ENGINE_FAILED, _BROKE)

    def _install_unsure(self, engine: Engine, call: Call, event: InstallUnsure, now: float) -> None:
        """The slot stays taken and the bytes stay pinned until the engine tells; the waiters need not wait for that."""
        slot = engine.slots[call.adapter]
        slot.unsure = True
        self._state.hold(slot, now)
        self._state.cache.pin(call.digest, ("unsure", engine.name, call.adapter))
        load = self._installing(engine, call.adapter)
        if load is not None:
            self._loads.try_others(load, now, Outcome.ENGINE_FAILED, _UNSURE)

    def _remove_done(self, engine: Engine, call: Call, event: RemoveDone, now: float) -> None:
        slot = engine.slots[call.adapter]
        load = self._clearing(engine, call.adapter)
        if event.removal is Removal.BUSY:
            self._state.counts["removals_busy"] += 1
            self._state.hold(slot, now)
            self._loads.serve(engine, slot, now)
            if load is not None:
                self._loads.seat(load, now)
            return
        del engine.slots[call.adapter]
        self._state.counts["evictions"] += 1
        self._state.slot_changed(engine, call.digest)
        if load is not None:
            self._loads.occupy(load, engine, now)

    def _remove_unsure(self, engine: Engine, call: Call, event: RemoveUnsure, now: float) -> None:
        """Asked again until the engine tells: it takes no leases meanwhile, so that nobody is sent to a gap."""
        slot = engine.slots[call.adapter]
        slot.unsure = True
        self._state.hold(slot, now)
        load = self._clearing(engine, call.adapter)
        if load is not None:
            self._loads.bounce(load, now)

    # calls that nobody knows the end of

    def retry_unsure(self, now: float) -> None:
        """Ask engines again about what they left open."""
        for engine in self._state.engines.values():
            if engine.calls:
                continue
            overdue = [slot for slot in engine.slots.values() if slot.unsure and slot.hold_until <= now]
            for slot in overdue:
                self._state.hold(slot, now)
                if slot.state is SlotState.REMOVING:
                    self._calls.remove(engine, slot)
            if any(slot.state is SlotState.INSTALLING for slot in overdue):
                self._calls.read(engine)

    def compare(self, now: float) -> None:
        """In quiet moments, compare what we know of engines with what they have."""
        for engine in self._state.engines.values():
            if engine.ready and not engine.calls and engine.read_at <= now and not self._state.queue.in_flight:
                engine.read_at = now + _COMPARE_EVERY_S
                self._calls.read(engine)

    def _installed_read(self, engine: Engine, call: Call, event: InstalledRead, now: float) -> None:
        if event.names is None:
            return
        if engine.count_foreign(event.names):
            self._state.changes.engines.add(engine.name)
        for adapter in event.names - engine.slots.keys():
            self._found(engine, adapter, now)
        for adapter in [name for name in engine.slots if engine.serving(name) and name not in event.names]:
            self._missed(engine, adapter, now)
        for slot in list(engine.slots.values()):
            if not slot.unsure or slot.state is not SlotState.INSTALLING:
                continue
            if slot.adapter in event.names:
                self._certain(engine, slot)
                self._loads.serve(engine, slot, now)
            else:
                # what was sent may still arrive, so the slot can't be given to another; the same name holds the
                # same bytes, so sending it again is safe, and its answer settles the matter
                self._certain(engine, slot)
                self._calls.install(engine, slot)

    def _found(self, engine: Engine, adapter: str, now: float) -> None:
        """An install of an earlier sidecar ended after we adopted the engine: its slot is taken."""
        ours = split_adapter_name(adapter)
        if ours is not None:
            self._state.counts["slots_found"] += 1
            slot = engine.slots[adapter] = Slot(adapter, ours[1], 0, SlotState.SERVING, used_at=now)
            self._loads.serve(engine, slot, now)

    def _missed(self, engine: Engine, adapter: str, now: float) -> None:
        """Somebody else took an adapter away: the next ask for it is a cold one."""
        self._state.counts["slots_missed"] += 1
        slot = engine.slots.pop(adapter)
        self._state.end_leases(self._state.leases.drop_adapter(engine.name, adapter), now, lost=False)
        self._state.slot_changed(engine, slot.digest)

    def _certain(self, engine: Engine, slot: Slot) -> None:
        slot.unsure = False
        self._state.cache.unpin(slot.digest, ("unsure", engine.name, slot.adapter))

    # helpers

    def _vacate(self, engine: Engine, call: Call) -> Load | None:
        """An install did not happen: its slot is free; returns the load that it was for, if any."""
        load = self._installing(engine, call.adapter)
        del engine.slots[call.adapter]
        self._state.slot_changed(engine, call.digest)
        return load

    def _installing(self, engine: Engine, adapter: str) -> Load | None:
        load = self._state.queue.get((engine.base, adapter))
        return load if load and load.stage is Stage.INSTALLING and load.engine == engine.name else None

    def _clearing(self, engine: Engine, victim: str) -> Load | None:
        for load in self._state.queue:
            if load.stage is Stage.CLEARING and load.engine == engine.name and load.victim == victim:
                return load
        return None

    def _of_digest(self, digest: str, *stages: Stage) -> list[Load]:
        return [load for load in self._state.queue if load.digest == digest and load.stage in stages]

    def _fail_loads(self, digest: str, outcome: Outcome, message: str, now: float) -> bool:
        """A fetch failed: whether any load was for it. What a mere guess came to is held against nobody who asks."""
        loads = self._of_digest(digest, Stage.FETCHING, Stage.WAITING)
        if loads:
            self._state.failures.remember(digest, message, now)
            self._state.counts["load_failures"] += 1
            self._state.digest_changed(digest)
        for load in self._state.queue.still(loads):
            self._loads.fail(load, now, outcome, message, elsewhere=True)
        return bool(loads)
