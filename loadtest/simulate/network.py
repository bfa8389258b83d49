"""Hosts and what connects them: the wire's sockets without ZeroMQ, with delays, broken links and dead processes.

Connections behave like TCP under ZeroMQ: in order, lossless while they stand, noticed as gone at once where a process
died, and after the heartbeat's bound where the network between two hosts is cut. What a cut holds back arrives when it
heals in time, and is lost when the connection breaks.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from wire.endpoints import HEARTBEAT_S, HEARTBEAT_TIMEOUT_S
from wire.feed import FeedPosition, Seen
from wire.frames import Kind
from wire.outcomes import DeadlinePassed, NoHealthyNode, RoostError
from wire.sockets import Sockets

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
        self._watchers: dict[Callable[[], None], None] = {}

    def sockets(self, host: str) -> Sockets:
        """Makers of the wire's sockets for a process on ``host``."""

        def requester(endpoint: str, asks: Any, answers: Any, **options: Any) -> Any:
            return MemoryRequester(
                self, host, endpoint, peer=options["peer"], patience_s=options.get("patience_s", 1.0)
            )

        def responder(endpoint: str, asks: Any, answers: Any, handler: Any, **options: Any) -> Any:
            return MemoryResponder(self, host, endpoint, handler)

        def publisher(endpoint: str, messages: Any, *, epoch: int, **options: Any) -> Any:
            return MemoryPublisher(self, host, endpoint, epoch)

        def subscriber(endpoint: str, messages: Any, **options: Any) -> Any:
            return MemorySubscriber(
                self,
                host,
                endpoint,
                on_message=options["on_message"],
                on_gap=options["on_gap"],
                on_silence=options.get("on_silence"),
                on_return=options.get("on_return"),
            )

        return Sockets(requester, responder, publisher, subscriber)

    def cut(self, one: str, other: str) -> None:
        """Nothing passes between two hosts until ``heal``."""
        self._cuts.add(frozenset((one, other)))
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


class MemoryReply:
    """As ``wire.responder.Reply``."""

    __slots__ = ("_link", "_loop", "_number", "deadline", "peer")

    def __init__(self, link: Link, number: int, deadline: float) -> None:
        self._link = link
        self._number = number
        self._loop = asyncio.get_running_loop()
        self.deadline = deadline
        self.peer = link.host.encode()

    @property
    def wanted(self) -> bool:
        return self._number != 0

    @property
    def expired(self) -> bool:
        return self._loop.time() >= self.deadline

    def __call__(self, answer: Any) -> bool:
        if not self.wanted or self.expired or not self._link.up:
            return False
        self._link.back.put((self._number, answer))
        return True


class MemoryResponder:
    """As ``wire.responder.Responder``."""

    def __init__(self, network: Network, host: str, endpoint: str, handler: Callable[[Any, Any], None]) -> None:
        self._network = network
        self._handler = handler
        self._closed = False
        self.host, self.endpoint = host, endpoint
        self.dropped: Counter[str] = Counter()
        network.serve(endpoint, self)

    def take(self, link: Link, piece: tuple[int, float, Any]) -> None:
        number, deadline, ask = piece
        if not self._closed:
            self._handler(ask, MemoryReply(link, number, deadline))

    def link_up(self, link: Link) -> None:
        """Nothing to tell."""

    def link_down(self, link: Link) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._network.withdraw(self.endpoint, self)


class MemoryRequester:
    """As ``wire.requester.Requester``."""

    def __init__(self, network: Network, host: str, endpoint: str, *, peer: str, patience_s: float) -> None:
        self.endpoint = endpoint
        self.dropped: Counter[str] = Counter()
        self._peer = peer
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._last = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._came_up = asyncio.Event()
        self._down_since = self._loop.time()
        self._link = Link(
            network, host, endpoint, receive=self._on_answer, on_up=self._came_up.set, on_down=self._on_down
        )

    @property
    def connected(self) -> bool:
        return self._link.up

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    async def request(self, ask: Any, *, timeout_s: float) -> Any:
        deadline = self._loop.time() + timeout_s
        if not self._link.up:
            await self._wait_for_peer(deadline)
        if deadline <= self._loop.time():
            raise DeadlinePassed(f"no answer from {self._peer} within {timeout_s:g} s")
        self._last += 1
        number = self._last
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[number] = answer
        self._link.forth.put((number, deadline, ask))
        timer = self._loop.call_at(deadline, self._on_deadline, number, timeout_s)
        try:
            return await answer
        finally:
            timer.cancel()
            self._waiting.pop(number, None)

    def send(self, ask: Any) -> bool:
        if not self._link.up:
            self.dropped["peer_gone"] += 1
            return False
        self._link.forth.put((0, math.inf, ask))
        return True

    def close(self) -> None:
        self._link.close()
        self._came_up.set()
        self._fail_all(f"the connection to {self._peer} was closed")

    async def _wait_for_peer(self, deadline: float) -> None:
        patient_until = self._down_since + self._patience_s
        try:
            async with asyncio.timeout_at(min(deadline, patient_until)):
                await self._came_up.wait()
        except TimeoutError:
            if deadline <= patient_until:
                raise DeadlinePassed(f"no answer from {self._peer} in time") from None
            raise NoHealthyNode(f"{self._peer} does not answer") from None
        if not self._link.up:
            raise NoHealthyNode(f"the connection to {self._peer} was closed")

    def _on_answer(self, piece: tuple[int, Any]) -> None:
        number, answer = piece
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _on_deadline(self, number: int, timeout_s: float) -> None:
        self._fail(number, DeadlinePassed(f"no answer from {self._peer} within {timeout_s:g} s"))

    def _on_down(self) -> None:
        self._came_up.clear()
        self._down_since = self._loop.time()
        self._fail_all(f"{self._peer} went away")

    def _fail_all(self, message: str) -> None:
        for number in list(self._waiting):
            self._fail(number, NoHealthyNode(message))

    def _fail(self, number: int, error: RoostError) -> None:
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)


class MemoryPublisher:
    """As ``wire.feed.FeedPublisher``; a heartbeat goes out only to those who just came, since no message is lost."""

    def __init__(self, network: Network, host: str, endpoint: str, epoch: int) -> None:
        self._network = network
        self._loop = asyncio.get_running_loop()
        self._links: dict[Link, None] = {}
        self._closed = False
        self.host, self.endpoint = host, endpoint
        self.epoch = epoch
        self.number = 0
        self.dropped: Counter[str] = Counter()
        network.serve(endpoint, self)

    def publish(self, message: Any) -> int:
        self.number += 1
        for link in self._links:
            link.back.put((self.epoch, self.number, Kind.MESSAGE, message))
        return self.number

    def take(self, link: Link, piece: Any) -> None:
        raise RuntimeError("a feed goes one way")

    def link_up(self, link: Link) -> None:
        self._links[link] = None
        self._loop.call_later(HEARTBEAT_S / 2, self._greet, link)

    def link_down(self, link: Link) -> None:
        self._links.pop(link, None)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._network.withdraw(self.endpoint, self)

    def _greet(self, link: Link) -> None:
        if link in self._links:
            link.back.put((self.epoch, self.number, Kind.HEARTBEAT, None))


class MemorySubscriber:
    """As ``wire.feed.FeedSubscriber``."""

    def __init__(
        self,
        network: Network,
        host: str,
        endpoint: str,
        *,
        on_message: Callable[[int, Any], None],
        on_gap: Callable[[int, int], None],
        on_silence: Callable[[], None] | None,
        on_return: Callable[[], None] | None,
    ) -> None:
        self.endpoint = endpoint
        self.silent = True
        self.dropped: Counter[str] = Counter()
        self._on_message, self._on_gap = on_message, on_gap
        self._on_silence, self._on_return = on_silence, on_return
        self._position = FeedPosition()
        self._link = Link(
            network, host, endpoint, receive=self._on_frame, on_up=lambda: None, on_down=self._fall_silent
        )

    @property
    def position(self) -> tuple[int, int]:
        return self._position.epoch or 0, self._position.next - 1

    def close(self) -> None:
        self._link.close()

    def _on_frame(self, frame: tuple[int, int, Kind, Any]) -> None:
        epoch, number, kind, message = frame
        if self.silent:
            self.silent = False
            if self._on_return is not None:
                self._on_return()
        expected = self._position.next if epoch == self._position.epoch else 1
        seen = self._position.see(epoch, number, kind)
        if seen is Seen.GAP:
            self._on_gap(expected, self._position.next if message is None else number)
        if message is not None and seen is not Seen.STALE:
            self._on_message(number, message)

    def _fall_silent(self) -> None:
        if not self.silent:
            self.silent = True
            if self._on_silence is not None:
                self._on_silence()
