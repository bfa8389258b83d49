"""How much each policy is asked, by the nodes' reports, and on how many nodes it should therefore be. Pure.

What counts are the leases that nodes report, of all gateways together: gateways that get the same reports at the same
times know the same. Only adapters with several leases on a node are counted: the others need one node anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

# leases of one policy, by default, that one node is good for: a quarter of what vLLM runs at once on a CUDA device
REPLICA_LEASES = 64
COOLDOWN_S = 30.0
# time constant of the smoothing: a burst shorter than this must not cost a load
_SMOOTHING_S = 1.0
# all that are followed are looked at as often as this, however many nodes report
_SWEEP_S = 0.25
# a node's leases of an adapter below this share of a replica's are left out
_FLOOR_SHARE = 8


class _Asked(msgspec.Struct):
    """One adapter: leases now, smoothed, and how many nodes that makes."""

    since: float
    changed: float
    leases: int = 0
    smoothed: float = 0.0
    replicas: int = 1


class Popularity:
    """``replicas`` goes up as soon as the smoothed load asks for it, and down by one each ``cooldown_s``.

    ``floor``: an engine's leases of an adapter below this need not be told.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        replica_leases: int = REPLICA_LEASES,
        cooldown_s: float = COOLDOWN_S,
    ) -> None:
        self._clock = clock
        self._replica_leases = replica_leases
        self._cooldown_s = cooldown_s
        self.floor = max(1, replica_leases // _FLOOR_SHARE)
        self._asked: dict[str, _Asked] = {}
        self._by_node: dict[str, dict[str, int]] = {}
        self._swept = -math.inf

    def __len__(self) -> int:
        """How many adapters are followed."""
        return len(self._asked)

    def replicas(self, adapter: str) -> int:
        """On how many nodes the adapter should be, at least 1."""
        asked = self._asked.get(adapter)
        return 1 if asked is None else asked.replicas

    def observe(self, node: str, leases: Mapping[str, int]) -> None:
        """All of which ``node`` has many leases now, by adapter."""
        before = self._by_node.get(node, {})
        if not leases and not before and not self._asked:
            return
        now = self._clock()
        for adapter in {name for name, _ in before.items() ^ leases.items()}:
            asked = self._asked.get(adapter) or self._asked.setdefault(adapter, _Asked(now, now))
            self._advance(asked, now)
            asked.leases += leases.get(adapter, 0) - before.get(adapter, 0)
        if leases:
            self._by_node[node] = dict(leases)
        else:
            self._by_node.pop(node, None)
        if now - self._swept >= _SWEEP_S:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        self._swept = now
        for adapter, asked in list(self._asked.items()):
            self._advance(asked, now)
            if asked.leases == 0 and asked.replicas == 1 and asked.smoothed < self.floor:
                del self._asked[adapter]

    def _advance(self, asked: _Asked, now: float) -> None:
        """Let the time since the last look pass, in which the leases were what they were."""
        passed = max(0.0, now - asked.since)
        asked.since = now
        asked.smoothed += (asked.leases - asked.smoothed) * -math.expm1(-passed / _SMOOTHING_S)
        needed = max(1, math.ceil(asked.smoothed / self._replica_leases))
        if needed > asked.replicas:
            asked.replicas, asked.changed = needed, now
        elif needed == asked.replicas:
            asked.changed = now
        elif now - asked.changed >= self._cooldown_s:
            asked.replicas, asked.changed = asked.replicas - 1, now
