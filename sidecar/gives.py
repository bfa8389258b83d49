"""What other nodes take of the arena, as the machine sees it."""

from __future__ import annotations

from collections.abc import Hashable

from .events import GiveBegun, GiveEnded
from .state import NodeState


class Gives:
    """What is being given stays in the arena until it has been; nothing leaves the arena for it."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def begun(self, event: GiveBegun, now: float) -> None:
        if not self._state.cache.resident(event.digest):
            raise RuntimeError(f"{event.digest} is given, but is not there")
        self._state.cache.pin(event.digest, _owner(event.give))

    def ended(self, event: GiveEnded, now: float) -> None:
        self._state.cache.unpin(event.digest, _owner(event.give))
        self._state.counts["given_bytes"] += event.given_bytes


def _owner(give: int) -> Hashable:
    return "give", give
