"""Bytes that will likely be asked for, fetched into the arena while nobody waits for anything.

A guess must not slow down what somebody asked for: one revision at a time is fetched, only once no load has run or
waited for a moment, and it is given up as soon as one does, unless that load is for these very bytes.
"""

from __future__ import annotations

import msgspec

from .effects import CancelFetch
from .events import RevisionOffered
from .known import KnownRevisions
from .loads import Loads
from .state import NodeState

_QUIET_S = 0.25
# a guess that had no chance for so long is out of date
_STALE_S = 600.0
_MAX_WANTED = 1024


class _Guess(msgspec.Struct, frozen=True):
    digest: str
    size: int
    until: float


class Prefetches:
    """What is to be fetched ahead, and the one fetch of it that is under way."""

    def __init__(self, state: NodeState, loads: Loads, known: KnownRevisions) -> None:
        self._state = state
        self._loads = loads
        self._known = known
        # by policy, whose later guess replaces the earlier one
        self._wanted: dict[str, _Guess] = {}
        self._fetching: str | None = None
        self._quiet_at = 0.0

    def offered(self, event: RevisionOffered, now: float) -> None:
        room = event.policy in self._wanted or len(self._wanted) < _MAX_WANTED
        sensible = event.size > 0 and self._state.cache.fits(event.size)
        if room and sensible and self._known.holds(event.policy):
            self._wanted[event.policy] = _Guess(event.digest, event.size, now + _STALE_S)

    def settle(self, now: float) -> None:
        """Begin, go on or give up, as the loads stand now. To be called after every event."""
        if self._state.cordoned:
            self._wanted.clear()
        if self._fetching is None and not self._wanted:
            return
        self._look_after_fetch()
        if self._state.queue.in_flight or self._state.queue.queued:
            self._quiet_at = now + _QUIET_S
            self._give_way()
        elif self._fetching is None and now >= self._quiet_at:
            self._begin(now)

    def _look_after_fetch(self) -> None:
        """The fetch may have ended, or be what a load waits for: then it is ours no more."""
        entry = self._state.cache.get(self._fetching) if self._fetching is not None else None
        if entry is None or entry.ready or entry.overdue or entry.pins or self._fetching in self._state.cancelled:
            self._fetching = None

    def _give_way(self) -> None:
        if self._fetching is None or any(load.digest == self._fetching for load in self._state.queue):
            return
        extent = self._state.cache.extent(self._fetching)
        self._state.cancelled.add(self._fetching)
        self._state.effects.append(CancelFetch(digest=self._fetching, generation=extent.generation))
        self._state.counts["prefetches_given_up"] += 1
        self._fetching = None

    def _begin(self, now: float) -> None:
        while self._wanted:
            key = next(iter(self._wanted))
            guess = self._wanted.pop(key)
            known = self._state.cache.get(guess.digest) is not None or guess.digest in self._state.failures
            if known or guess.until < now:
                continue
            self._state.neighbours.expect(key, guess.digest)
            if self._loads.fetch(guess.digest, guess.size, now, spare_leased=True):
                self._state.counts["prefetches"] += 1
                self._fetching = guess.digest
                return
