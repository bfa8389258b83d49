"""What must hold between any two events. A broken line here is a bug of ours, never of our inputs."""

from __future__ import annotations

from collections import Counter

from .admission import Stage
from .slots import SlotState
from .state import NodeState


def audit(state: NodeState) -> list[str]:
    """What does not add up, one sentence each; empty where everything does."""
    return [*_leases(state), *_slots(state), *_loads(state), *_arena(state)]


def _leases(state: NodeState) -> list[str]:
    wrong = state.leases.check()
    by_engine = Counter(lease.engine for lease in state.leases)
    by_slot = Counter((lease.engine, lease.adapter) for lease in state.leases if lease.adapter)
    for engine in state.engines.values():
        if engine.outstanding != by_engine[engine.name]:
            wrong.append(f"{engine.name} counts {engine.outstanding} leases, of {by_engine[engine.name]}")
        for slot in engine.slots.values():
            held = by_slot.pop((engine.name, slot.adapter), 0)
            if slot.leases != held:
                wrong.append(f"{slot.adapter} on {engine.name} counts {slot.leases} leases, of {held}")
            if held and slot.state in (SlotState.REMOVING, SlotState.INSTALLING):
                wrong.append(f"{slot.adapter} on {engine.name} is {slot.state} with {held} leases")
    return wrong + [
        f"{count} leases are for {adapter}, not on {engine}" for (engine, adapter), count in by_slot.items()
    ]


def _slots(state: NodeState) -> list[str]:
    wrong = []
    for engine in state.engines.values():
        if engine.limits is None and (engine.slots or engine.queued or engine.call):
            wrong.append(f"{engine.name} is not ready, but has slots or calls")
        drained_for = [load.drained[1] for load in state.queue if load.drained]
        draining = [slot for slot in engine.slots.values() if slot.state is SlotState.DRAINING]
        strays = [slot for slot in draining if not any(slot is other for other in drained_for)]
        wrong += [f"{slot.adapter} on {engine.name} is drained for nobody" for slot in strays]
        installing = sum(slot.state is SlotState.INSTALLING for slot in engine.slots.values())
        # strangers' adapters are not counted here: they come without asking us
        if engine.limits and installing and len(engine.slots) > engine.limits.slots:
            wrong.append(f"{engine.name} has {len(engine.slots)} adapters and {engine.limits.slots} slots")
    return wrong


def _loads(state: NodeState) -> list[str]:
    wrong = []
    if state.queue.in_flight > state.queue.limit:
        wrong.append(f"{state.queue.in_flight} loads are in flight")
    if state.queue.room < -state.queue.limit:
        wrong.append(f"{state.queue.queued} loads are queued")
    for load in state.queue:
        entry = state.cache.get(load.digest)
        if load.stage is not Stage.WAITING and (entry is None or not entry.pins):
            wrong.append(f"the load of {load.adapter} is {load.stage} without its bytes pinned")
        if load.stage is Stage.WAITING and not load.waiters and not load.background:
            wrong.append(f"nobody waits for the load of {load.adapter}")
    return wrong


def _arena(state: NodeState) -> list[str]:
    wrong = []
    edge = 0
    for extent, digest in sorted((state.cache.extent(digest), digest) for digest in state.cache):
        if extent.offset < edge:
            wrong.append(f"the extent of {digest} overlaps its neighbour")
        edge = extent.offset + extent.length
    if edge > state.cache.capacity:
        wrong.append("an extent ends past the arena")
    return wrong
