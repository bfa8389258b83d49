"""Engine calls: as many at a time as an engine takes, each numbered, holding its extent until it has truly ended."""

from __future__ import annotations

from collections.abc import Hashable

from .effects import ReadInstalled, StartInstall, StartRemove
from .slots import Call, CallKind, Engine, Slot, SlotState
from .state import NodeState


class EngineCalls:
    """Queues calls and sends them. Most engines work through all calls they have before they compute again, so that a
    second call sent at once would lengthen the pause of everybody's tokens: ``EngineLimits.calls_at_once`` says which
    don't."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._op = 0
        # calls under way when their engine died: they may still be reading the arena
        self._orphans: dict[int, Call] = {}

    def install(self, engine: Engine, slot: Slot) -> None:
        """Queue the install of ``slot.adapter``, whose bytes are resident."""
        call = self._queue(engine, CallKind.INSTALL, slot)
        self._state.cache.pin(slot.digest, _owner(call))
        self._send_next(engine)

    def remove(self, engine: Engine, slot: Slot) -> None:
        self._queue(engine, CallKind.REMOVE, slot)
        self._send_next(engine)

    def read(self, engine: Engine) -> None:
        self._queue(engine, CallKind.READ, None)
        self._send_next(engine)

    def ended(self, engine: Engine, op: int) -> Call | None:
        """The call that ended; None for one of an engine's former life, whose result says nothing of this one."""
        orphan = self._orphans.pop(op, None)
        if orphan is not None:
            self._state.cache.unpin(orphan.digest, _owner(orphan))
            return None
        call = engine.calls.pop(op, None)
        if call is None:
            return None
        self._state.cache.unpin(call.digest, _owner(call))
        self._send_next(engine)
        return call

    def abandon(self, engine: Engine) -> Call | None:
        """The engine is gone: forget what was queued; returns the call that it worked at, the oldest under way."""
        for queued in engine.queued:
            self._state.cache.unpin(queued.digest, _owner(queued))
        engine.queued.clear()
        self._orphans |= engine.calls
        oldest = next(iter(engine.calls.values()), None)
        engine.calls = {}
        return oldest

    def _queue(self, engine: Engine, kind: CallKind, slot: Slot | None) -> Call:
        self._op += 1
        call = Call(self._op, kind, slot.adapter, slot.digest) if slot else Call(self._op, kind)
        engine.queued.append(call)
        return call

    def _send_next(self, engine: Engine) -> None:
        while engine.takes_call:
            call = engine.queued.popleft()
            engine.calls[call.op] = call
            self._send(engine, call)

    def _send(self, engine: Engine, call: Call) -> None:
        effects = self._state.effects
        if call.kind is CallKind.READ:
            effects.append(ReadInstalled(engine=engine.name, op=call.op))
        elif call.kind is CallKind.REMOVE:
            effects.append(StartRemove(engine=engine.name, op=call.op, adapter=call.adapter))
        else:
            slot = engine.slots[call.adapter]
            entry = self._state.cache.get(call.digest)
            if entry is None or slot.state is not SlotState.INSTALLING:
                raise RuntimeError(f"install of {call.adapter} queued without its bytes or its slot")
            effects.append(
                StartInstall(
                    engine=engine.name,
                    op=call.op,
                    adapter=call.adapter,
                    digest=call.digest,
                    rank=slot.rank,
                    extent=entry.extent,
                )
            )


def _owner(call: Call) -> Hashable:
    return "call", call.op
