"""Which slot a load gets, who leaves for it, and who makes room for a load that has waited too long."""

from __future__ import annotations

from collections import Counter

from .admission import Load, Stage
from .slots import Engine, LoadKey, Slot, SlotState
from .state import NodeState

# idle time below which two slots are equally fresh
_INSTANT_S = 1e-3
# a tenant with so many slots, and so many times as many as another, takes none of the other's
_MANY, _FAR_MORE = 4, 2.0


class Seats:
    """The slots of a node's engines, as loads compete for them.

    Who leaves is the one whose idle time is longest for what bringing it back costs (so an adapter whose bytes are in
    the arena goes before one whose bytes are not). While there is another, it is no other tenant's that has no more
    than its share of the slots, or no more than the one who asks, and used it within ``slot_share_s``; and nobody who
    came within ``min_residency_s``. A tenant that has many times as many slots as such a tenant waits for its own.
    """

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._settings = state.settings
        # loads that have a slot drained for them, and maybe some that had
        self._claimers: set[LoadKey] = set()

    def pick(self, load: Load, now: float) -> Engine | None:
        """Where to install: what most of who wait can ask, then one with a free slot, else with an idle slot, the least
        busy first."""
        fitting = [
            engine
            for engine in self._state.by_base[load.base]
            if self._may_hold(engine, load, now)
            and self.room(engine, load, now) > 0
            and (engine.free_slots > 0 or self._may_take(self._idle(engine, load, now), load))
        ]
        return min(
            fitting,
            key=lambda engine: (
                load.not_by[engine.settings.backend], engine.free_slots == 0, engine.outstanding, engine.name,
            ),
            default=None,
        )  # fmt: skip

    def any_room(self, base: str, asker: Load | None, now: float) -> bool:
        """Whether any engine of ``base`` could take one more adapter, of whatever rank."""
        return any(self.room(engine, asker, now) > 0 for engine in self._state.by_base[base])

    def room(self, engine: Engine, asker: Load | None, now: float) -> int:
        """Slots to be had on ``engine`` by ``asker``, less those that loads still fetching their bytes count on."""
        counted = sum(
            load.engine == engine.name and load is not asker and not self.claims(load)
            for load in self._state.queue.flying()
            if load.stage is Stage.FETCHING
        )
        return engine.free_slots + len(self._idle(engine, asker, now)) - counted

    def victim(self, engine: Engine, load: Load, now: float) -> Slot | None:
        """The idle slot that ``load`` takes: the one that was drained for it, else the one that is missed least."""
        idle = self._may_take(self._idle(engine, load, now), load)
        if len(idle) < 2:
            return idle[0] if idle else None
        spared, _ = self._protected(engine, load.tenant, now)
        return min(idle, key=lambda slot: (not slot.claimed_by, *self._worth(slot, spared, now), slot.used_at))

    def superseded(self, engine: Engine, adapters: frozenset[str], now: float) -> Slot | None:
        """The slot of one of ``adapters`` that was used longest ago, and not within the minimal residency."""
        limit = now - self._settings.min_residency_s
        idle = [slot for slot in self._idle(engine, None, now) if slot.adapter in adapters and slot.used_at <= limit]
        return min(idle, key=lambda slot: slot.used_at, default=None)

    # fairness by age

    def overdue(self, load: Load, now: float) -> bool:
        return load.blocked_since is not None and now - load.blocked_since > self._settings.slot_age_bound_s

    def blocked(self, load: Load, now: float) -> bool:
        """Note that ``load`` had its turn and found no slot or no room; whether that is so for too long."""
        if load.blocked_since is None:
            load.blocked_since = now
        return self.overdue(load, now)

    def claims(self, load: Load) -> bool:
        """Whether a slot is being kept from new leases for ``load``, and still there to be had."""
        if load.drained is None:
            return False
        engine, slot = load.drained
        return slot.claimed_by == load.key and self._state.engines[engine].slots.get(slot.adapter) is slot

    def in_vain(self, load: Load, now: float) -> bool:
        """Whether the slot that is drained for ``load`` has not become idle within the age bound."""
        return self.claims(load) and now - load.drained_at > self._settings.slot_age_bound_s

    def drain_for(self, load: Load, now: float) -> None:
        """Let the slot that will probably be idle first take no new leases, for the sake of an overdue load.

        Those drained for it in vain come last. A resident has its quantum first: it came for somebody who had waited as
        well.
        """
        loads = ((key, self._state.queue.get(key)) for key in self._claimers)
        self._claimers = {key for key, other in loads if other is not None and self.claims(other)}
        if len(self._claimers) >= self._state.queue.limit:
            return
        holders = [engine for engine in self._state.by_base[load.base] if self._may_hold(engine, load, now)]
        ripe = [
            (
                load.drains[engine.name, slot.adapter],
                _tenant(slot) in spared,
                self._lasts_s(slot, begun[slot.adapter], now),
                slot.used_at,
                engine.name,
                slot.adapter,
            )
            for engine in holders
            for begun in (self._begun(engine),)
            for spared, barred in (self._protected(engine, load.tenant, now),)
            for slot in engine.slots.values()
            if slot.state is SlotState.SERVING
            and slot.leases
            and self._settled(slot, now)
            and _tenant(slot) not in barred
        ]
        if ripe:
            *_, name, adapter = min(ripe)
            engine = self._state.engines[name]
            slot = engine.slots[adapter]
            slot.state = SlotState.DRAINING
            slot.claimed_by = load.key
            load.drained = name, slot
            load.drained_at = now
            load.drains[name, adapter] += 1
            self._claimers.add(load.key)
            self._state.counts["drains"] += 1
            self._state.slot_changed(engine, slot.digest)

    def give_up_claim(self, load: Load) -> tuple[Engine, Slot] | None:
        """``load`` needs no other's slot any more; the one that was drained for it, if it still is."""
        drained = load.drained if self.claims(load) else None
        load.drained = None
        if drained is None:
            return None
        name, slot = drained
        slot.claimed_by = None
        return (self._state.engines[name], slot) if slot.state is SlotState.DRAINING else None

    def _begun(self, engine: Engine) -> dict[str, float]:
        """When the oldest lease of each of its adapters began."""
        begun: dict[str, float] = {}
        for lease in self._state.leases.of_engine(engine.name):
            begun[lease.adapter] = min(lease.since, begun.get(lease.adapter, lease.since))
        return begun

    def _lasts_s(self, slot: Slot, begun: float, now: float) -> float:
        """How long leases are likely to keep a slot: as the adapter's usually do, or as long again as the oldest."""
        usual = slot.lease_s or self._state.lease_s
        return max(usual.value, now - begun)

    # who is missed least

    def _may_hold(self, engine: Engine, load: Load, now: float) -> bool:
        return (
            engine.loadable
            and load.is_for(engine.settings.backend)
            and load.adapter not in engine.slots
            and self._state.misfit(engine, load.digest, load.rank, now) is None
        )

    def _settled(self, slot: Slot, now: float) -> bool:
        return now - slot.since >= self._settings.min_residency_s

    def _worth(self, slot: Slot, spared: set[str], now: float) -> tuple[bool, bool, float]:
        """What giving up an idle slot would lose, in the order of what counts first."""
        resident = self._state.cache.resident(slot.digest)
        cost_s = self._state.queue.times.cost(slot.size, resident=resident)
        return (
            _tenant(slot) in spared,
            not self._settled(slot, now),
            cost_s / max(now - slot.used_at, _INSTANT_S),
        )

    def _idle(self, engine: Engine, asker: Load | None, now: float) -> list[Slot]:
        """The slots that ``asker`` may take now."""
        key = asker.key if asker else None
        idle = [slot for slot in engine.slots.values() if slot.evictable(now, key)]
        if asker is None or not idle:
            return idle
        _, barred = self._protected(engine, asker.tenant, now)
        return [slot for slot in idle if slot.claimed_by or _tenant(slot) not in barred] if barred else idle

    def _may_take(self, idle: list[Slot], load: Load) -> list[Slot]:
        """Those of ``idle`` that leave for ``load``, whether somebody waits for it or not."""
        return [slot for slot in idle if slot.adapter in load.replaces] if load.background else idle

    def _protected(self, engine: Engine, tenant: str, now: float) -> tuple[set[str], set[str]]:
        """The tenants from which ``tenant`` takes a slot only where there is no other, and those from which never.

        The first use no more than their share of the engine's slots, or than ``tenant`` itself; the others, of them,
        have far fewer than it.
        """
        using = Counter(
            _tenant(slot)
            for slot in engine.slots.values()
            if slot.leases or now - slot.used_at < self._settings.slot_share_s
        )
        own = using.pop(tenant, 0)
        if not using:
            return set(), set()
        share = len(engine.slots) / (len(using) + 1)
        spared = {other for other, count in using.items() if count <= max(share, own)}
        barred = {other for other in spared if using[other] <= min(share, own / _FAR_MORE)} if own >= _MANY else set()
        return spared, barred


def _tenant(slot: Slot) -> str:
    return slot.adapter.partition("@")[0]
