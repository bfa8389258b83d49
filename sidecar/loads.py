"""Cold loads: what may start, and the way of a load from the queue through the arena into a slot."""

from __future__ import annotations

from collections.abc import Hashable

from wire.outcomes import Outcome

from .admission import Load, Stage
from .calls import EngineCalls
from .effects import ClearExtent, StartFetch
from .events import Asked
from .slots import Engine, Slot, SlotState
from .state import NodeState
from .waiters import WaitingRoom


class Loads:
    """Starts loads as permits, slots and arena room allow, the oldest first."""

    def __init__(self, state: NodeState, calls: EngineCalls, waiters: WaitingRoom) -> None:
        self._state = state
        self._queue = state.queue
        self._calls = calls
        self._waiters = waiters
        # an overdue load needs arena room: nothing younger takes any meanwhile
        self._arena_claimed = False

    # into the queue

    def admit(self, asked: Asked, adapter: str, now: float) -> None:
        """Wait for the load of ``adapter``, begin one, or refuse because a bound is reached."""
        request = asked.request
        load = self._queue.get((request.base, adapter))
        if load is not None:
            self._join(asked, load)
            return
        if not self._queue.may_start and self._queue.room <= 0:
            self._refuse_bound(asked, self._bound_message())
            return
        load = self._queue.add(request.base, adapter, request.digest, request.size, request.rank)
        self._state.changes.loads = True
        self._waiters.join(asked, load)
        self.pump(now)
        if load.waiters and load.stage is Stage.WAITING and self._queue.room < 0:
            self.fail(
                load,
                now,
                Outcome.COLD_LOAD_BOUND,
                self._bound_message(),
                retry_after_s=self._queue.retry_after_s(),
                elsewhere=True,
            )

    def restore(self, engine: Engine, adapter: str, digest: str, size: int, rank: int) -> None:
        """Bring an adapter back that ``engine`` lost when it died, if a slot is free and nobody else needs it."""
        if self._queue.get((engine.base, adapter)) is None:
            self._queue.add(engine.base, adapter, digest, size, rank, background=True)

    def give_up_unwanted(self, load: Load, now: float) -> None:
        """The last waiter may have left: a load that has not started ends with it."""
        if load.stage is Stage.WAITING and not load.waiters:
            self.finish(load, now)

    def _join(self, asked: Asked, load: Load) -> None:
        if len(load.waiters) >= self._state.settings.waiters_per_load:
            self._refuse_bound(asked, f"{len(load.waiters)} requests wait for this revision already")
            return
        self._waiters.join(asked, load)
        if load.background:
            self._queue.promote(load)

    # what may start

    def pump(self, now: float) -> None:
        """Start every waiting load that can start."""
        self._arena_claimed = False
        full: set[str] = set()
        for load in self._queue.waiting():
            if not self._queue.may_start:
                return
            if load.stage is not Stage.WAITING or self._queue.get(load.key) is not load:
                # starting another one ended it
                continue
            engine = None if load.base in full else self._pick(load, now)
            if engine is None:
                self._lacks_slot(load, now)
                if not any(self._room(other, None, now) > 0 for other in self._state.by_base[load.base]):
                    full.add(load.base)
            elif not self._has_bytes(load, now):
                self._lacks_arena(load, now)
            else:
                self._start(load, engine, now)

    def _start(self, load: Load, engine: Engine, now: float) -> None:
        self._queue.start(load, now)
        self._state.changes.loads = True
        load.engine = engine.name
        load.stage = Stage.FETCHING
        self._state.cache.pin(load.digest, _owner(load))
        if self._state.cache.resident(load.digest):
            self.seat(load, now)

    def _pick(self, load: Load, now: float) -> Engine | None:
        """Where to install: an engine with a free slot, else one with an idle slot, the least busy first."""
        fitting = [
            engine
            for engine in self._state.by_base[load.base]
            if self._may_hold(engine, load, now)
            and self._room(engine, load, now) > 0
            and (engine.free_slots > 0 or not load.background)
        ]
        return min(fitting, key=lambda engine: (engine.free_slots == 0, engine.outstanding, engine.name), default=None)

    def _may_hold(self, engine: Engine, load: Load, now: float) -> bool:
        return (
            engine.loadable
            and load.adapter not in engine.slots
            and self._state.misfit(engine, load.digest, load.rank, now) is None
        )

    def _room(self, engine: Engine, asker: Load | None, now: float) -> int:
        """Slots to be had on ``engine``, less those that loads still fetching their bytes count on."""
        counted = sum(
            load.engine == engine.name and load is not asker for load in self._queue if load.stage is Stage.FETCHING
        )
        return engine.room(now) - counted

    def _has_bytes(self, load: Load, now: float) -> bool:
        """Whether the bytes are in the arena or on their way; begins a fetch if there is room for one."""
        return self._state.cache.get(load.digest) is not None or (
            not load.background
            and not self._arena_claimed
            and self.fetch(load.digest, load.size, now, spare_leased=not self._overdue(load, now))
        )

    def fetch(self, digest: str, size: int, now: float, *, spare_leased: bool) -> bool:
        """Begin to fetch; False where what may not be evicted leaves no room.

        ``spare_leased``: what leases use stays. Without it, only what loads and installs hold does: a lease needs the
        engine's copy, not ours.
        """
        keep = self._state.leases.uses if spare_leased else _nothing
        reserved = self._state.cache.reserve(digest, size, now, keep)
        if reserved is None:
            return False
        extent, evicted = reserved
        for victim, where in evicted:
            self._state.effects.append(ClearExtent(digest=victim, extent=where))
            self._state.digest_changed(victim)
        self._state.effects.append(StartFetch(digest=digest, extent=extent))
        self._state.digest_changed(digest)
        return True

    # fairness by age

    def _overdue(self, load: Load, now: float) -> bool:
        return load.blocked_since is not None and now - load.blocked_since > self._state.settings.slot_age_bound_s

    def _lacks_slot(self, load: Load, now: float) -> None:
        """Past the age bound, a resident makes room."""
        if load.background:
            # it was a favour, and there is no room for favours
            self.finish(load, now)
        elif self._blocked_too_long(load, now) and not self._draining(load):
            self._drain_for(load, now)

    def _lacks_arena(self, load: Load, now: float) -> None:
        """Past the age bound, nobody younger takes arena room before it."""
        if load.background:
            self.finish(load, now)
        elif self._blocked_too_long(load, now):
            self._arena_claimed = True

    def _blocked_too_long(self, load: Load, now: float) -> bool:
        if load.blocked_since is None:
            load.blocked_since = now
        return self._overdue(load, now)

    def _draining(self, load: Load) -> bool:
        """Whether a slot is being kept from new leases for ``load``, and still there to be had."""
        if load.drained is None:
            return False
        engine, slot = load.drained
        return slot.state is SlotState.DRAINING and self._state.engines[engine].slots.get(slot.adapter) is slot

    def _drain_for(self, load: Load, now: float) -> None:
        """Let the slot that will be idle first take no new leases, for the sake of an overdue load."""
        if sum(self._draining(other) for other in self._queue) >= self._queue.limit:
            return
        holders = [engine for engine in self._state.by_base[load.base] if self._may_hold(engine, load, now)]
        candidates = [(engine, slot) for engine in holders if (slot := engine.idle_most()) is not None]
        if candidates:
            engine, slot = min(candidates, key=lambda pair: (pair[1].leases, pair[1].used_at))
            slot.state = SlotState.DRAINING
            load.drained = engine.name, slot
            self._state.counts["drains"] += 1
            self._state.slot_changed(engine, slot.digest)

    def _undrain(self, load: Load, now: float) -> None:
        """The slot that was drained for ``load`` serves again, unless it was taken."""
        if self._draining(load) and load.drained is not None:
            engine, slot = load.drained
            load.drained = None
            self.serve(self._state.engines[engine], slot, now)
        load.drained = None

    # from the arena into a slot

    def seat(self, load: Load, now: float) -> None:
        """The bytes are resident: take a slot for them, clear one, or wait again if all were taken meanwhile."""
        engine = self._pick(load, now) if load.waiters or load.background else None
        if engine is None:
            self.bounce(load, now)
            return
        load.engine = engine.name
        victim = None if engine.free_slots > 0 else engine.victim(now)
        if victim is None:
            self.occupy(load, engine, now)
        else:
            victim.state = SlotState.REMOVING
            load.stage = Stage.CLEARING
            load.victim = victim.adapter
            self._state.slot_changed(engine, victim.digest)
            self._calls.remove(engine, victim)
        self._undrain(load, now)

    def occupy(self, load: Load, engine: Engine, now: float) -> None:
        """Install into a slot that is free."""
        slot = Slot(load.adapter, load.digest, load.rank, SlotState.INSTALLING, used_at=now)
        engine.slots[load.adapter] = slot
        load.stage = Stage.INSTALLING
        load.victim = ""
        self._state.slot_changed(engine, load.digest)
        self._calls.install(engine, slot)

    def bounce(self, load: Load, now: float) -> None:
        """Back to waiting at its age's place, holding nothing; given up if nobody waits."""
        if not load.waiters:
            self.finish(load, now)
            return
        self._state.cache.unpin(load.digest, _owner(load))
        self._queue.requeue(load)
        self._state.changes.loads = True

    # how loads end

    def serve(self, engine: Engine, slot: Slot, now: float) -> None:
        """``slot`` takes leases from now on: grant those who wait for its adapter."""
        slot.state = SlotState.SERVING
        slot.unsure = False
        self._state.slot_changed(engine, slot.digest)
        load = self._queue.get((engine.base, slot.adapter))
        if load is None:
            return
        self._waiters.grant(load, engine, now)
        installed_here = load.stage is Stage.INSTALLING and load.engine == engine.name
        if installed_here:
            self._queue.measured(now - load.started)
        if installed_here or load.stage is Stage.WAITING:
            self.finish(load, now)

    def fail(
        self,
        load: Load,
        now: float,
        outcome: Outcome,
        message: str,
        *,
        retry_after_s: float | None = None,
        elsewhere: bool = False,
    ) -> None:
        """Refuse everybody who waits, and end the load."""
        self._waiters.refuse(load, outcome, message, retry_after_s=retry_after_s, elsewhere=elsewhere)
        self.finish(load, now)

    def finish(self, load: Load, now: float) -> None:
        """Forget a load that nobody waits for any more; what it held is free."""
        self._queue.remove(load)
        self._state.cache.unpin(load.digest, _owner(load))
        self._state.changes.loads = True
        self._undrain(load, now)

    def _refuse_bound(self, asked: Asked, message: str) -> None:
        self._state.refuse(
            [asked.ask],
            asked.request.lease,
            Outcome.COLD_LOAD_BOUND,
            message,
            retry_after_s=self._queue.retry_after_s(),
            elsewhere=True,
        )

    def _bound_message(self) -> str:
        node = self._state.settings.node
        return f"{self._queue.in_flight} loads are in flight and {self._queue.queued} wait on node {node}"


def _owner(load: Load) -> Hashable:
    return "load", load.key


def _nothing(_: str) -> bool:
    return False
