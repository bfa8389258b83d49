"""Signs of life: telling one node that this gateway is there, and now and then what it holds of the node, and who else
is in the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from wire.node import AnswerOfNode, AskOfNode, FleetKeys, GatewayAlive, Holding
from wire.sockets import Requester

_EVERY_S = 3.0
# to a node that is away, or that did not take it
_RETRY_S = 0.25
_HOLDING_EVERY_S = 30.0
# of all nodes: much, and it hardly changes
_KEYS_EVERY_S = 300.0


class SignsOfLife:
    """Tells on its own, until closed. ``holding`` says what is held there, None where nobody knows yet; ``keys`` are
    those of the fleet's nodes, of which nothing is told where they have none."""

    def __init__(
        self,
        requester: Requester[AskOfNode, AnswerOfNode],
        alive: GatewayAlive,
        holding: Callable[[], Holding | None],
        keys: Callable[[], dict[str, str]],
    ) -> None:
        self._requester = requester
        self._alive = alive
        self._holding = holding
        self._keys = keys
        self._loop = asyncio.get_running_loop()
        self._untold = True
        self._holding_at = 0.0
        self._keys_at = 0.0
        self._timer: asyncio.Handle = self._loop.call_soon(self._tell)

    def tell_all(self) -> None:
        """It is another life of the node, or it may have missed something: it is told at once what is held there."""
        self._untold = True
        self.tell_keys()

    def tell_keys(self) -> None:
        """The fleet has changed."""
        self._keys_at = 0.0
        self._timer.cancel()
        self._timer = self._loop.call_soon(self._tell)

    def close(self) -> None:
        self._timer.cancel()

    def _tell(self) -> None:
        # first of all: whatever goes wrong now, the next sign is sent
        self._timer = self._loop.call_later(_RETRY_S, self._tell)
        if not self._requester.connected:
            return
        taken = self._requester.send(self._alive)
        now = self._loop.time()
        if self._untold or now >= self._holding_at:
            holding = self._holding()
            taken = taken and (holding is None or self._requester.send(holding))
            self._untold = not taken
            self._holding_at = now + _HOLDING_EVERY_S
        if now >= self._keys_at:
            keys = self._keys()
            told = not keys or self._requester.send(FleetKeys(gateway=self._alive.gateway, keys=keys))
            self._keys_at = now + _KEYS_EVERY_S if told else 0.0
            taken = taken and told
        if taken:
            self._timer.cancel()
            self._timer = self._loop.call_later(_EVERY_S, self._tell)
