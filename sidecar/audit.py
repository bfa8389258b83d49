"""What must hold between any two events. A broken line here is a bug of ours, never of our inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from .admission import Stage
from .gate import most_queued
from .slots import Engine, SlotState
from .state import NodeState

# one part of the books at a time, so that no tick becomes long: all of them take some seconds
_EVERY_S = 1.0
# a line that stays wrong is told once
_MAX_KNOWN = 1024


def audit(state: NodeState) -> list[str]:
    """What does not add up, one sentence each; empty where everything does."""
    return [line for part in _parts(state) for line in part()]


class Auditor:
    """Goes through the books for ever, a part a second, and counts the lines that were found wrong."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._rounds = self._in_turn()
        self._due = 0.0
        self._known: dict[str, None] = {}
        self._untold: list[str] = []

    def tick(self, now: float) -> None:
        """Audit the next part if it is time."""
        if now < self._due:
            return
        self._due = now + _EVERY_S
        for line in next(self._rounds)():
            if line not in self._known and len(self._known) < _MAX_KNOWN:
                self._known[line] = None
                self._untold.append(line)
                self._state.counts["audit_findings"] += 1

    def untold(self) -> list[str]:
        """What was found since this was asked last."""
        untold, self._untold = self._untold, []
        return untold

    def _in_turn(self) -> Iterator[Callable[[], list[str]]]:
        while True:
            yield from _parts(self._state)


def _parts(state: NodeState) -> Iterator[Callable[[], list[str]]]:
    yield state.leases.check
    for engine in state.engines.values():
        yield lambda engine=engine: _engine_leases(state, engine)  # type: ignore[misc]
        yield lambda engine=engine: _slots(state, engine)  # type: ignore[misc]
    yield lambda: _loads(state)
    yield lambda: _arena(state)


def _engine_leases(state: NodeState, engine: Engine) -> list[str]:
    wrong = []
    by_adapter = Counter(lease.adapter for lease in state.leases.of_engine(engine.name))
    if engine.outstanding != by_adapter.total():
        wrong.append(f"{engine.name} counts {engine.outstanding} leases, of {by_adapter.total()}")
    by_adapter.pop("", None)
    for slot in engine.slots.values():
        held = by_adapter.pop(slot.adapter, 0)
        if slot.leases != held:
            wrong.append(f"{slot.adapter} on {engine.name} counts {slot.leases} leases, of {held}")
        if held and slot.state in (SlotState.REMOVING, SlotState.INSTALLING):
            wrong.append(f"{slot.adapter} on {engine.name} is {slot.state} with {held} leases")
    return wrong + [f"{count} leases are for {adapter}, not on {engine.name}" for adapter, count in by_adapter.items()]


def _slots(state: NodeState, engine: Engine) -> list[str]:
    wrong = []
    if engine.limits is None and (engine.slots or engine.queued or engine.calls):
        wrong.append(f"{engine.name} is not ready, but has slots or calls")
    for slot in engine.slots.values():
        load = state.queue.get(slot.claimed_by) if slot.claimed_by else None
        claimed = load is not None and load.drained is not None and load.drained[1] is slot
        if claimed != (slot.claimed_by is not None) or (slot.state is SlotState.DRAINING and not claimed):
            wrong.append(f"{slot.adapter} on {engine.name} is drained for nobody")
    installing = sum(slot.state is SlotState.INSTALLING for slot in engine.slots.values())
    # strangers' adapters are not counted here: they come without asking us
    if engine.limits and installing and len(engine.slots) > engine.limits.slots:
        wrong.append(f"{engine.name} has {len(engine.slots)} adapters and {engine.limits.slots} slots")
    return wrong


def _loads(state: NodeState) -> list[str]:
    queue = state.queue
    wrong = []
    handed = sum(load.handed for load in queue)
    if queue.in_flight - handed > state.settings.loads_in_flight or handed > queue.hands + queue.limit:
        wrong.append(f"{queue.in_flight} loads are in flight")
    # loads that had started and lost their slot wait beyond the bound
    if queue.queued > most_queued(state.settings) + state.settings.loads_in_flight:
        wrong.append(f"{queue.queued} loads are queued")
    if sum(load.stage is Stage.WAITING and not load.background for load in queue) != queue.queued:
        wrong.append(f"{queue.queued} loads have turns, of those that wait")
    for load in queue:
        entry = state.cache.get(load.digest)
        if load.stage is not Stage.WAITING and (entry is None or not entry.pins):
            wrong.append(f"the load of {load.adapter} is {load.stage} without its bytes pinned")
        if load.stage is Stage.FETCHING and load.digest in state.cancelled:
            wrong.append(f"the load of {load.adapter} waits for a fetch that was told to stop")
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
