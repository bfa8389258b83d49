"""Cold loads: what may start, and the way of a load from the queue through the arena into a slot."""

from __future__ import annotations

from collections.abc import Hashable

from wire.outcomes import Outcome

from .admission import Load, Stage
from .calls import EngineCalls
from .effects import CancelFetch, ClearExtent, StartFetch
from .estimates import Estimates
from .events import Asked
from .extents import Extent
from .gate import Gate
from .pace import Pace
from .promises import Promises
from .seats import Seats
from .slots import Engine, Slot, SlotState
from .state import NodeState
from .waiters import WaitingRoom


class Loads:
    """Starts loads as permits, slots and arena room allow, in the order of their tenants' turns."""

    def __init__(self, state: NodeState, calls: EngineCalls, waiters: WaitingRoom) -> None:
        self._state = state
        self._queue = state.queue
        self._calls = calls
        self._waiters = waiters
        self._seats = Seats(state)
        self._promises = Promises()
        self._pace = Pace(state, self._promises)
        self._gate = Gate(state.settings, state.queue, self._promises)
        self.estimates = Estimates(state.queue, self._promises, self._pace, state.counts)
        # an overdue load needs arena room: nothing whose turn is later takes any meanwhile
        self._arena_claimed = False

    # into the queue

    def admit(self, asked: Asked, adapter: str, now: float) -> None:
        """Wait for the load of ``adapter``, begin one, or refuse because a bound is reached."""
        request = asked.request
        key = request.base, adapter
        load = self._queue.get(key)
        if load is not None:
            self._join(asked, load, now)
            return
        closed = self._gate.closed(request.tenant, key, now)
        if closed and not self._may_start_at_once(request.base, request.tenant, now):
            retry_after_s = self.estimates.come_back_s(request.tenant, key, now)
            self._refuse_bound(asked, closed, retry_after_s)
            return
        promise = None if closed else self._promises.redeem(request.tenant, key)
        load = self._queue.add(request.base, adapter, request.digest, request.size, request.rank, now, promise=promise)
        self._state.changes.loads = True
        self._waiters.join(asked, load)
        self.pump(now)
        if closed and load.stage is Stage.WAITING and load.waiters:
            self._turn_away(load, closed, now)
        elif (other := self._gate.too_many(now)) is not None:
            message = f"the queue of node {self._node} is full, and other tenants have less than their share of it"
            self._turn_away(other, message, now)

    def _may_start_at_once(self, base: str, tenant: str, now: float) -> bool:
        room = self._queue.has_permit and self._seats.any_room(base, None, now)
        return room and not self._pace.holds(base, tenant, now)

    def restore(self, engine: Engine, adapter: str, digest: str, size: int, rank: int, now: float) -> None:
        """Bring an adapter back that ``engine`` lost when it died, if a slot is free and nobody else needs it."""
        self.warm(engine.base, adapter, digest, size, rank, now)

    def warm(
        self, base: str, adapter: str, digest: str, size: int, rank: int, now: float, *,
        replaces: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """Have an adapter serve whose bytes are here, before it is asked for: in a slot that is free, or that nobody
        uses of one that it ``replaces``."""
        serves = any(adapter in engine.slots for engine in self._state.by_base.get(base, ()))
        if not serves and self._queue.get((base, adapter)) is None and not self._state.cordoned:
            load = self._queue.add(base, adapter, digest, size, rank, now, background=True)
            load.replaces = replaces

    def vacate_one(self, base: str, adapters: frozenset[str], now: float) -> None:
        """Have a slot free on each full engine of ``base`` that has one of ``adapters`` which nobody uses of late."""
        for engine in self._state.by_base.get(base, ()):
            slot = self._seats.superseded(engine, adapters, now) if engine.loadable else None
            if slot is not None and engine.free_slots == 0:
                slot.state = SlotState.REMOVING
                self._state.slot_changed(engine, slot.digest)
                self._calls.remove(engine, slot)

    def give_up_unwanted(self, load: Load, now: float) -> None:
        """The last waiter may have left: a load that has not started ends with it, and one whose bytes have only
        begun to come, if others wait for their turn."""
        if load.waiters or load.background:
            return
        if load.stage is Stage.WAITING:
            self.finish(load, now)
        elif load.stage is Stage.FETCHING and self._queue.queued and self._cancel_fetch(load, now):
            self.finish(load, now)
            self.pump(now)

    def refuse_waiting(self, outcome: Outcome, message: str, now: float) -> None:
        """Nothing new is loaded here any more: whoever waits for a load that has not begun is sent elsewhere."""
        for load in self._queue.still(self._queue.order()):
            self.fail(load, now, outcome, message, elsewhere=True)

    def _join(self, asked: Asked, load: Load, now: float) -> None:
        if len(load.waiters) >= self._state.settings.waiters_per_load:
            message = f"{len(load.waiters)} requests wait for this revision already"
            self._refuse_bound(asked, message, self.estimates.serves_in_s(load, now))
            return
        self._waiters.join(asked, load)
        if load.background:
            self._queue.promote(load, now)

    # what may start

    def pump(self, now: float) -> None:
        """Start every waiting load that can start."""
        if not self._queue.may_start:
            return
        self._arena_claimed = False
        # bases without a slot for anybody, and for a tenant; and whether a tenant has to wait for the sake of others
        full: set[str] = set()
        full_for: set[tuple[str, str]] = set()
        held: dict[tuple[str, str], bool] = {}
        for load in self._queue.order():
            if load.stage is not Stage.WAITING or self._queue.get(load.key) is not load:
                # starting another one ended it
                continue
            if load.digest in self._state.cancelled:
                # its bytes come once more, when nobody writes what the fetch was to bring that was told to stop
                continue
            place = load.base, load.tenant
            if self._is_held(load, held, now):
                continue
            hopeless = (load.base in full or place in full_for) and not self._seats.claims(load)
            engine = None if hopeless else self._seats.pick(load, now)
            if engine is None:
                self._lacks_slot(load, now)
                if not hopeless and not self._seats.any_room(load.base, None, now):
                    full.add(load.base)
                elif not hopeless and not self._seats.any_room(load.base, load, now):
                    full_for.add(place)
            elif not self._has_bytes(load, now):
                self._lacks_arena(load, now)
            else:
                self._start(load, engine, now)
                held.pop(place, None)
            if not self._queue.may_start:
                return

    def _is_held(self, load: Load, held: dict[tuple[str, str], bool], now: float) -> bool:
        """Whether ``load`` has to wait for the sake of others; ``held`` knows that of its base and tenant then."""
        if load.background:
            return False
        place = load.base, load.tenant
        if place not in held:
            held[place] = self._pace.holds(*place, now)
        return held[place]

    def _start(self, load: Load, engine: Engine, now: float) -> None:
        resident = self._state.cache.resident(load.digest)
        if not load.background:
            self._pace.started(load.base, load.tenant, now)
        self._queue.start(load, now, resident=resident)
        self.estimates.started(load, now)
        self._state.changes.loads = True
        load.engine = engine.name
        load.stage = Stage.FETCHING
        self._state.cache.pin(load.digest, _owner(load))
        if resident:
            self._state.cache.touch(load.digest)
            self.seat(load, now)

    def _has_bytes(self, load: Load, now: float) -> bool:
        """Whether the bytes are in the arena or on their way; begins a fetch if there is room for one."""
        return self._state.cache.get(load.digest) is not None or (
            not load.background
            and not self._arena_claimed
            and self.fetch(load.digest, load.size, now, spare_leased=not self._seats.overdue(load, now))
        )

    def fetch(self, digest: str, size: int, now: float, *, spare_leased: bool) -> bool:
        """Begin to fetch; False where what may not be evicted leaves no room.

        ``spare_leased``: what leases use stays. Without it, only what loads and installs hold does: a lease needs the
        engine's copy, not ours.
        """
        extent = self.reserve(digest, size, now, spare_leased=spare_leased)
        if extent is None:
            return False
        peers = self._state.neighbours.of(digest, now)
        self._state.cache.ask(digest, peers)
        self._state.effects.append(StartFetch(digest=digest, extent=extent, peers=peers))
        self._state.digest_changed(digest)
        return True

    def reserve(self, key: str, size: int, now: float, *, spare_leased: bool) -> Extent | None:
        """An extent for what is about to come; see ``fetch``."""
        keep = self._state.leases.uses if spare_leased else _nothing
        reserved = self._state.cache.reserve(key, size, now, keep)
        if reserved is None:
            return None
        extent, evicted = reserved
        for victim, where in evicted:
            self._state.effects.append(ClearExtent(digest=victim, extent=where))
            self._state.digest_changed(victim)
        return extent

    def _cancel_fetch(self, load: Load, now: float) -> bool:
        """Stop the fetch of a load that nobody waits for, unless others share it or most of it is done."""
        entry = self._state.cache.get(load.digest)
        if entry is None or entry.ready or entry.overdue or entry.pulled or load.digest in self._state.cancelled:
            return False
        if now - entry.since > self._queue.times.fetch_s(load.size) / 2.0:
            return False
        if any(other.digest == load.digest for other in self._queue if other is not load):
            return False
        self._state.cancelled.add(load.digest)
        self._state.counts["fetches_cancelled"] += 1
        self._state.effects.append(CancelFetch(digest=load.digest, generation=entry.extent.generation))
        return True

    # fairness by age

    def _lacks_slot(self, load: Load, now: float) -> None:
        """Past the age bound, a resident makes room; and another one, where it does not do so in time."""
        if load.background:
            # it was a favour, and there is no room for favours
            self.finish(load, now)
        elif self._seats.blocked(load, now):
            if self._seats.in_vain(load, now):
                self._undrain(load, now)
            if not self._seats.claims(load):
                self._seats.drain_for(load, now)

    def _lacks_arena(self, load: Load, now: float) -> None:
        """Past the age bound, nobody whose turn is later takes arena room before it."""
        if load.background:
            self.finish(load, now)
        elif self._seats.blocked(load, now):
            self._arena_claimed = True

    def _undrain(self, load: Load, now: float) -> None:
        """The slot that was drained for ``load`` serves again, unless it was taken."""
        claimed = self._seats.give_up_claim(load)
        if claimed is not None:
            self.serve(*claimed, now)

    # from the arena into a slot

    def seat(self, load: Load, now: float) -> None:
        """The bytes are resident: take a slot for them, clear one, or wait again if all were taken meanwhile."""
        engine = self._seats.pick(load, now) if load.waiters or load.background else None
        if engine is None:
            self.bounce(load, now)
            return
        load.engine = engine.name
        if engine.calls_at_once > 1:
            self._queue.hand_over(load, now)
        victim = None if engine.free_slots > 0 else self._seats.victim(engine, load, now)
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
        """Install into a slot that is free; not if nobody waits for it any more."""
        if not load.waiters and not load.background:
            self.finish(load, now)
            return
        slot = Slot(load.adapter, load.digest, load.rank, SlotState.INSTALLING, used_at=now, size=load.size)
        engine.slots[load.adapter] = slot
        load.stage = Stage.INSTALLING
        load.victim = ""
        load.sent = now
        self._state.slot_changed(engine, load.digest)
        self._calls.install(engine, slot)

    def bounce(self, load: Load, now: float) -> None:
        """Back to waiting at its age's place, holding nothing; given up if nobody waits."""
        if not load.waiters:
            self.finish(load, now)
            return
        self._state.cache.unpin(load.digest, _owner(load))
        self._queue.requeue(load, now)
        self._state.changes.loads = True

    # how loads end

    def serve(self, engine: Engine, slot: Slot, now: float) -> None:
        """``slot`` takes leases from now on: grant those who wait for its adapter, and can ask the engine."""
        if slot.state is SlotState.INSTALLING:
            slot.since = now
        slot.state = SlotState.SERVING
        slot.unsure = False
        self._state.slot_changed(engine, slot.digest)
        load = self._queue.get((engine.base, slot.adapter))
        if load is None:
            return
        self._waiters.grant(load, engine, now)
        installed_here = load.stage is Stage.INSTALLING and load.engine == engine.name
        if installed_here:
            self._queue.served(load, now)
        if installed_here and load.waiters:
            message = f"no other engine of base {load.base} on node {self._node} can load this now"
            self.try_others(load, now, Outcome.NO_HEALTHY_NODE, message)
        elif installed_here or (load.stage is Stage.WAITING and not load.waiters):
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

    def try_others(self, load: Load, now: float, outcome: Outcome, message: str) -> None:
        """Its engine could not load it: another one of the node may, else another node."""
        if any(
            other.ready
            and load.is_for(other.settings.backend)
            and load.adapter not in other.slots
            and self._state.misfit(other, load.digest, load.rank, now) is None
            for other in self._state.by_base[load.base]
        ):
            self.bounce(load, now)
        else:
            self.fail(load, now, outcome, message, elsewhere=True)

    def finish(self, load: Load, now: float) -> None:
        """Forget a load that nobody waits for any more; what it held is free."""
        self._forget(load, now)

    def _turn_away(self, load: Load, message: str, now: float) -> None:
        """End a load that waits because a bound is reached."""
        self.estimates.put_out(load)
        retry_after_s = self.estimates.come_back_s(load.tenant, load.key, now, order=load.order)
        self._waiters.refuse(load, Outcome.COLD_LOAD_BOUND, message, retry_after_s=retry_after_s, elsewhere=True)
        self._forget(load, now, refused=True)

    def _forget(self, load: Load, now: float, *, refused: bool = False) -> None:
        self._queue.remove(load, now, refused=refused)
        self._state.cache.unpin(load.digest, _owner(load))
        self._state.changes.loads = True
        self._undrain(load, now)

    def _refuse_bound(self, asked: Asked, message: str, retry_after_s: float) -> None:
        self._state.refuse(
            [asked.ask],
            asked.request.lease,
            Outcome.COLD_LOAD_BOUND,
            message,
            retry_after_s=retry_after_s,
            elsewhere=True,
        )

    @property
    def _node(self) -> str:
        return self._state.settings.node


def _owner(load: Load) -> Hashable:
    return "load", load.key


def _nothing(_: str) -> bool:
    return False
