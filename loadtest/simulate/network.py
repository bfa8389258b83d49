"""Hosts and what connects them, with delays, cuts and dead processes; ``sockets`` makes the wire's sockets of it.

Connections behave like TCP under ZeroMQ: in order, lossless while they stand, noticed as gone at once where a process
died, and after the heartbeat's bound where the network between two hosts is cut. What a cut holds back arrives when it
heals in time, and is lost when the connection breaks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from wire.endpoints import HEARTBEAT_TIMEOUT_S

# one way between two processes; half of what loadtest/results/lease.json has for a whole lease
LATENCY_S = 60e-6
_RECONNECT_S = 0.1


class Pipe:
    """One direction of one connection: in order, each piece ``latency_s`` after it was put in."""

    def __init__(self, receive: Callable[[Any], None], latency_s: float = LATENCY_S) -> None:
        self._receive = receive
        self._latency_s = latency_s
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[Any] = deque()
        self._held: list[Any] | None = None
        self._life = 0

    def put(self, piece: Any) -> None:
        if self._held is not None:
            self._held.append(piece)
            return
        self._under_way.append(piece)
        self._loop.call_later(self._latency_s, self._deliver, self._life)

    def hold(self) -> None:
        """The network is cut: nothing arrives until ``flow``."""
        if self._held is None:
            self._held = list(self._under_way)
            self._under_way.clear()
            self._life += 1

    def flow(self) -> None:
        held, self._held = self._held, None
        for piece in held or ():
            self.put(piece)

    def drop(self) -> None:
        """The connection broke: what is under way is lost."""
        self._under_way.clear()
        self._held = None
        self._life += 1

    def _deliver(self, life: int) -> None:
        if life == self._life:
            self._receive(self._under_way.popleft())


class Link:
    """One connection of ``host`` to whoever serves at ``endpoint``. ``on_up`` and ``on_down`` tell of changes.

    ``forth`` and ``back`` take what travels; both exist for as long as the link does.
    """

    def __init__(
        self,
        network: Network,
        host: str,
        endpoint: str,
        *,
        receive: Callable[[Any], None],
        on_up: Callable[[], None],
        on_down: Callable[[], None],
    ) -> None:
        self._network = network
        self._loop = asyncio.get_running_loop()
        self._on_up, self._on_down = on_up, on_down
        self._timer: asyncio.TimerHandle | None = None
        self._server: Any = None
        self.host, self.endpoint = host, endpoint
        self.up = False
        self.forth = Pipe(lambda piece: self._server.take(self, piece))
        self.back = Pipe(receive)
        network.join(self)
        self.look(at_once=True)

    def look(self, *, at_once: bool = False) -> None:
        """Something changed at the other end or in between."""
        server = self._network.server(self.endpoint)
        cut = server is not None and self._network.is_cut(self.host, server.host)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.up and server is not self._server:
            self._break()
            self.look()
        elif self.up and cut:
            self.forth.hold()
            self.back.hold()
            self._timer = self._loop.call_later(HEARTBEAT_TIMEOUT_S, self._give_up)
        elif self.up:
            self.forth.flow()
            self.back.flow()
        elif server is not None and not cut:
            self._timer = self._loop.call_later(0.0 if at_once else _RECONNECT_S, self._come_up)

    def close(self) -> None:
        self._network.leave(self)
        if self._timer is not None:
            self._timer.cancel()
        if self.up:
            self.up = False
            self._server.link_down(self)
        self.forth.drop()
        self.back.drop()

    def _come_up(self) -> None:
        self._timer = None
        self._server = self._network.server(self.endpoint)
        self.up = True
        self._server.link_up(self)
        self._on_up()

    def _give_up(self) -> None:
        self._break()
        self.look()

    def _break(self) -> None:
        self.up = False
        self._server.link_down(self)
        self.forth.drop()
        self.back.drop()
        self._on_down()


class Network:
    """Who serves where, who is connected, and between which hosts nothing passes."""

    def __init__(self) -> None:
        self._servers: dict[str, Any] = {}
        self._links: dict[Link, None] = {}
        self._cuts: set[frozenset[str]] = set()
        # how many cuts there were, healed ones included
        self.cuts = 0
        self._watchers: dict[Callable[[], None], None] = {}

    def cut(self, one: str, other: str) -> None:
        """Nothing passes between two hosts until ``heal``."""
        self._cuts.add(frozenset((one, other)))
        self.cuts += 1
        self._changed()

    def heal(self, one: str, other: str) -> None:
        self._cuts.discard(frozenset((one, other)))
        self._changed()

    def is_cut(self, one: str, other: str) -> bool:
        return bool(self._cuts) and frozenset((one, other)) in self._cuts

    def watch(self, look: Callable[[], None]) -> None:
        """``look`` is called whenever a cut begins or ends."""
        self._watchers[look] = None

    def forget(self, look: Callable[[], None]) -> None:
        self._watchers.pop(look, None)

    # for sockets

    def server(self, endpoint: str) -> Any:
        return self._servers.get(endpoint)

    def serve(self, endpoint: str, server: Any) -> None:
        if endpoint in self._servers:
            raise ValueError(f"another process serves at {endpoint}")
        self._servers[endpoint] = server
        self._look(endpoint)

    def withdraw(self, endpoint: str, server: Any = None) -> None:
        """Nobody serves there any more; with ``server``, only where it is that one that did."""
        if server is None or self._servers.get(endpoint) is server:
            self._servers.pop(endpoint, None)
            self._look(endpoint)

    def join(self, link: Link) -> None:
        self._links[link] = None

    def leave(self, link: Link) -> None:
        self._links.pop(link, None)

    def _look(self, endpoint: str) -> None:
        for link in [link for link in self._links if link.endpoint == endpoint]:
            link.look()

    def _changed(self) -> None:
        for link in list(self._links):
            link.look()
        for look in list(self._watchers):
            look()
