"""Which other nodes may have bytes that this one needs, and which of them are not asked.

Gateways tell who has a digest. A policy's next revision is first asked of those who had the one before: they hear of it
as well, and fetch it ahead. Nobody has to be right: whoever has nothing says so, and the store has everything.
"""

from __future__ import annotations

from wire.peers import Peer

from .events import PeerFailed
from .negative import NegativeCache

# asked for one fetch: each that has nothing costs a round trip, or a deadline
MAX_PEERS = 2
_MAX_KNOWN = 4096
# one that did not answer in time, and one that gave something else than was asked for, and the longest of such pauses
_SILENT_S, _SILENT_MAX_S = 5.0, 60.0
_WRONG_S, _WRONG_MAX_S = 300.0, 3600.0
# in reports
_MAX_FAULTY = 16


class Neighbours:
    """Peers by digest and by policy, as told last, and those that are not asked for a while."""

    def __init__(self, node: str, *, on: bool) -> None:
        self._node = node
        self._on = on
        self._by_digest: dict[str, tuple[Peer, ...]] = {}
        self._by_policy: dict[str, tuple[Peer, ...]] = {}
        self._silent: NegativeCache[str] = NegativeCache(_SILENT_S, _SILENT_MAX_S)
        self._wrong: NegativeCache[str] = NegativeCache(_WRONG_S, _WRONG_MAX_S)
        self.faults: dict[str, int] = {}
        """By node, how often it gave something else than was asked for."""

    def told(self, policy: str, digest: str, peers: tuple[Peer, ...]) -> None:
        """A gateway says who has ``digest``, a revision of ``policy``."""
        _note(self._by_digest, digest, peers)
        if peers and policy:
            _note(self._by_policy, policy, peers)

    def expect(self, policy: str, digest: str) -> None:
        """``digest`` is new of ``policy``: whoever had the one before may have it."""
        if digest not in self._by_digest and policy in self._by_policy:
            _note(self._by_digest, digest, self._by_policy[policy])

    def of(self, digest: str, now: float) -> tuple[Peer, ...]:
        """Whom to ask for ``digest``, in this order."""
        if not self._on:
            return ()
        return tuple(peer for peer in self._by_digest.get(digest, ()) if self.may_ask(peer.node, now))[:MAX_PEERS]

    def failed(self, event: PeerFailed, now: float) -> None:
        # it may have moved: no guess is made of it until a gateway tells of it again
        for policy, peers in list(self._by_policy.items()):
            _note(self._by_policy, policy, tuple(peer for peer in peers if peer.node != event.node))
        if not event.wrong:
            self._silent.remember(event.node, event.message, now)
            return
        self._wrong.remember(event.node, event.message, now)
        count = self.faults.pop(event.node, 0) + 1
        self.faults[event.node] = count
        if len(self.faults) > _MAX_FAULTY:
            del self.faults[next(iter(self.faults))]

    def answered(self, node: str) -> None:
        """It gave all that it was asked for: its next silence is a first one."""
        self._silent.forgive(node)

    def may_ask(self, node: str, now: float) -> bool:
        """Whether ``node`` is another one, and did not fail lately."""
        blocked = self._silent.blocked(node, now) or self._wrong.blocked(node, now)
        return node != self._node and blocked is None


def _note(known: dict[str, tuple[Peer, ...]], key: str, peers: tuple[Peer, ...]) -> None:
    known.pop(key, None)
    if peers:
        known[key] = peers
        if len(known) > _MAX_KNOWN:
            del known[next(iter(known))]
