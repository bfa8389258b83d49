"""After a crash of either side: what a gateway holds and what we think that it holds are made one again."""

from __future__ import annotations

import math

from catalog.names import split_adapter_name
from wire.node import HeldLease, Holding

from .leases import Lease, LeaseKey
from .slots import Slot
from .state import NodeState
from .waiters import WaitingRoom


class Resync:
    """Takes over what gateways say that they hold.

    A lease that we know nothing of (we were restarted, or took its gateway for dead) is entered if its engine still has
    its adapter. One that the gateway does not name, though it had chosen its number by then, was given back in a
    message that was lost.
    """

    def __init__(self, state: NodeState, waiters: WaitingRoom) -> None:
        self._state = state
        self._waiters = waiters

    def take(self, holding: Holding, now: float) -> tuple[list[LeaseKey], list[Slot]]:
        """Bring the books in line with ``holding``.

        Returns the waiters that the gateway waits for no more, still to be withdrawn, and the slots that became idle.
        """
        gateway = holding.gateway
        named = {held.lease for held in holding.leases}.union(holding.asked)
        gone = [
            lease
            for number in self._state.leases.of_gateway(gateway) - named
            if number <= holding.newest and (lease := self._state.leases.drop((gateway, number))) is not None
        ]
        self._state.counts["leases_given_back_unheard"] += len(gone)
        idle = self._state.end_leases(gone, now, lost=False)
        for held in holding.leases:
            if self._state.leases.get((gateway, held.lease)) is None:
                self._adopt(held, holding, now)
        waited = [key for key in self._waiters.of_gateway(gateway) if key[1] not in named and key[1] <= holding.newest]
        return waited, [slot for slot in idle if not slot.leases]

    def _adopt(self, held: HeldLease, holding: Holding, now: float) -> None:
        engine = self._state.engines.get(held.engine)
        ours = split_adapter_name(held.adapter)
        there = engine is not None and engine.ready and (not held.adapter or engine.leasable(held.adapter))
        ends = 0.0 < held.ttl_s < math.inf
        if not there or (ours is None and held.adapter) or not ends:
            self._state.counts["leases_not_adopted"] += 1
            return
        lease = Lease(holding.gateway, held.lease, held.engine, held.adapter, ours[1] if ours else "", now)
        self._state.count_lease(lease, holding.instance, now + held.ttl_s, now)
        self._state.counts["leases_adopted"] += 1
