"""How fast one tenant's loads start while others use the same engines: each is a pause in everybody's tokens."""

from __future__ import annotations

import msgspec

from .promises import Promises
from .slots import Engine
from .state import NodeState

# who has asked for something within this time is still there
_RECENT_S = 2.0
# so much of what it may start in this time may start at once
_BURST_S = 1.0
_SHORTEST_S = 1e-6


class _Level(msgspec.Struct):
    """How many loads started lately, as of ``at``: it falls at the rate at which they may."""

    loads: float
    at: float


class Pace:
    """Holds a tenant's loads to ``tenant_loads_per_s`` an engine of their base while another tenant asks there that
    waits for no load itself; where steps are slow, to so few that they take ``tenant_loads_share`` of an engine's time.

    An install lasts a step at least, for which it waits, and brings a request that makes each step after it longer.

    Tenants that all wait for loads share the engines by their turns alone, and one that is alone has them for itself.
    """

    def __init__(self, state: NodeState, promises: Promises) -> None:
        self._state = state
        self._promises = promises
        self._levels: dict[tuple[str, str], _Level] = {}

    def holds(self, base: str, tenant: str, now: float) -> bool:
        """Whether a load of ``tenant`` for ``base`` has to wait because of others."""
        level = self._levels.get((base, tenant))
        if level is None:
            return False
        rate = self._rate(base)
        self._settle(level, rate, now)
        if level.loads + 1.0 > _burst(rate):
            return self._disturbs(base, tenant, now)
        if level.loads == 0.0:
            del self._levels[base, tenant]
        return False

    def started(self, base: str, tenant: str, now: float) -> None:
        """A load of ``tenant`` began. What it began while it was alone is not held against it for longer than a
        burst."""
        rate = self._rate(base)
        level = self._levels.setdefault((base, tenant), _Level(0.0, now))
        self._settle(level, rate, now)
        level.loads = min(level.loads + 1.0, _burst(rate))

    def interval_s(self, base: str, tenant: str, now: float) -> float:
        """From one load of ``tenant`` to its next; 0 where nobody else has a say in that."""
        return 1.0 / self._rate(base) if self._disturbs(base, tenant, now) else 0.0

    def _settle(self, level: _Level, rate: float, now: float) -> None:
        level.loads = max(0.0, level.loads - rate * (now - level.at))
        level.at = now

    def _rate(self, base: str) -> float:
        """Loads a second that one tenant may start for ``base``."""
        engines = max(1, sum(engine.ready for engine in self._state.by_base[base]))
        install_s = max(self._state.queue.times.install_s, _SHORTEST_S)
        settings = self._state.settings
        return engines * min(settings.tenant_loads_per_s, settings.tenant_loads_share / install_s)

    def _disturbs(self, base: str, tenant: str, now: float) -> bool:
        """Whether anybody else is asking for ``base`` who waits for no load, here or having been told to come back."""
        others = set().union(*(_active(engine, now) for engine in self._state.by_base[base])) - {tenant}
        loading = {load.tenant for load in self._state.queue.flying()} if others else set()
        turns, promises = self._state.queue.turns, self._promises
        return any(not turns.of(other) and not promises.pending(other) and other not in loading for other in others)


def _burst(rate: float) -> float:
    return max(1.0, rate * _BURST_S)


def _active(engine: Engine, now: float) -> set[str]:
    """The tenants whose adapters are in use on ``engine``, or were a moment ago."""
    return {
        slot.adapter.partition("@")[0]
        for slot in engine.slots.values()
        if slot.leases or now - slot.used_at < _RECENT_S
    }
