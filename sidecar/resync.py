"""After a crash of either side: what a gateway holds and what we think that it holds are made one again."""

from __future__ import annotations

import math

import msgspec

from catalog.names import split_adapter_name
from wire.node import HeldLease, Holding

from .leases import Lease, LeaseKey
from .slots import Engine, Slot
from .state import NodeState
from .waiters import WaitingRoom


class _Hold(msgspec.Struct):
    """A slot that was adopted at ``since`` is left alone until ``until``, or until it is known who uses it."""

    engine: str
    slot: Slot
    since: float
    until: float


class _Word(msgspec.Struct, frozen=True):
    """What a gateway told ``at`` some time, and on which engines it had leases that could not be entered then."""

    at: float
    not_entered: frozenset[str]


class Resync:
    """Takes over what gateways say that they hold.

    A lease that we know nothing of (we were restarted, or took its gateway for dead) is entered if its engine still has
    its adapter. One that the gateway does not name, though it had chosen its number by then, was given back in a
    message that was lost.
    """

    def __init__(self, state: NodeState, waiters: WaitingRoom) -> None:
        self._state = state
        self._waiters = waiters
        self._holds: list[_Hold] = []
        self._words: dict[str, _Word] = {}

    def hold(self, engine: Engine, slot: Slot, now: float) -> None:
        """Requests that we know nothing of may be using a slot, and its engine can't say so."""
        until = slot.hold_until = now + self._state.settings.lost_lease_hold_s
        self._holds.append(_Hold(engine.name, slot, now, until))

    def end_holds(self, now: float) -> None:
        """Let go of slots that were held until gateways told who uses them: all that are heard have, and whoever is
        not heard by now counts as dead."""
        grace_s = self._state.settings.gateway_silence_s
        over = [hold for hold in self._holds if now - hold.since > grace_s and self._all_told(hold)]
        for hold in over:
            if hold.slot.hold_until == hold.until:
                hold.slot.hold_until = now
        self._holds = [hold for hold in self._holds if hold.until > now and hold not in over]
        heard = self._state.leases.gateways
        self._words = {gateway: word for gateway, word in self._words.items() if gateway in heard}

    def excuse(self, seconds: float) -> None:
        """We were not listening for ``seconds``: who was not heard then may have told all the same."""
        for hold in self._holds:
            hold.since += seconds

    def _all_told(self, hold: _Hold) -> bool:
        heard = self._state.leases.gateways
        words = [word for gateway in heard if (word := self._words.get(gateway)) is not None]
        entered = all(word.at > hold.since or hold.engine not in word.not_entered for word in words)
        return 0 < len(heard) == len(words) and entered

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
        not_entered = set()
        for held in holding.leases:
            if self._state.leases.get((gateway, held.lease)) is None and not self._adopt(held, holding, now):
                not_entered.add(held.engine)
        self._words[gateway] = _Word(now, frozenset(not_entered))
        waited = [key for key in self._waiters.of_gateway(gateway) if key[1] not in named and key[1] <= holding.newest]
        return waited, [slot for slot in idle if not slot.leases]

    def _adopt(self, held: HeldLease, holding: Holding, now: float) -> bool:
        engine = self._state.engines.get(held.engine)
        ours = split_adapter_name(held.adapter)
        there = engine is not None and engine.ready and (not held.adapter or engine.leasable(held.adapter))
        ends = 0.0 < held.ttl_s < math.inf
        if not there or (ours is None and held.adapter) or not ends:
            self._state.counts["leases_not_adopted"] += 1
            return False
        lease = Lease(holding.gateway, held.lease, held.engine, held.adapter, ours[1] if ours else "", now)
        self._state.count_lease(lease, holding.instance, now + held.ttl_s, now)
        self._state.counts["leases_adopted"] += 1
        return True
