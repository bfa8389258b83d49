"""The wire's sockets over a modelled network: what ``wire.sockets.Sockets`` makes for a process of a simulation."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from wire.endpoints import HEARTBEAT_S
from wire.feed import FeedPosition, Seen
from wire.frames import Kind
from wire.outcomes import DeadlinePassed, NoHealthyNode, RoostError
from wire.sockets import Sockets

from .network import Link, Network


def sockets(network: Network, host: str) -> Sockets:
    """Makers of the wire's sockets for a process on ``host``."""

    def requester(endpoint: str, asks: Any, answers: Any, **options: Any) -> Any:
        return MemoryRequester(network, host, endpoint, peer=options["peer"], patience_s=options.get("patience_s", 1.0))

    def responder(endpoint: str, asks: Any, answers: Any, handler: Any, **options: Any) -> Any:
        return MemoryResponder(network, host, endpoint, handler)

    def publisher(endpoint: str, messages: Any, *, epoch: int, **options: Any) -> Any:
        return MemoryPublisher(network, host, endpoint, epoch)

    def subscriber(endpoint: str, messages: Any, **options: Any) -> Any:
        return MemorySubscriber(
            network,
            host,
            endpoint,
            on_message=options["on_message"],
            on_gap=options["on_gap"],
            on_silence=options.get("on_silence"),
            on_return=options.get("on_return"),
        )

    return Sockets(requester, responder, publisher, subscriber)


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
