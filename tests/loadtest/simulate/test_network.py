"""The modelled sockets behave as the wire's do: in order, lossless while they stand, honest about what broke."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from loadtest.simulate.clock import simulate
from loadtest.simulate.network import Network
from loadtest.simulate.sockets import sockets
from wire.endpoints import HEARTBEAT_TIMEOUT_S
from wire.outcomes import DeadlinePassed, NoHealthyNode

ASKS, FEED = "memory://n/asks", "memory://n/feed"


class Sides:
    """A server on host ``n`` that answers twice the number it gets, and a client on host ``g``."""

    def __init__(self, *, answers: bool = True) -> None:
        self.network = Network()
        self.heard: list[int] = []
        self._answers = answers
        self.responder = self.serve()
        self.requester = sockets(self.network, "g").requester(ASKS, None, None, peer="node n", patience_s=1.0)

    def serve(self) -> Any:
        return sockets(self.network, "n").responder(ASKS, None, None, self._handle)

    def _handle(self, ask: int, reply: Any) -> None:
        self.heard.append(ask)
        if self._answers and reply.wanted:
            reply(2 * ask)

    async def ask(self, number: int, timeout_s: float = 10.0) -> Any:
        return await self.requester.request(number, timeout_s=timeout_s)


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    simulate(scene)


def test_asks_are_answered_in_order() -> None:
    async def scene() -> None:
        sides = Sides()
        assert await asyncio.gather(*(sides.ask(number) for number in range(5))) == [0, 2, 4, 6, 8]
        assert sides.requester.send(99)
        await asyncio.sleep(0.01)
        assert sides.heard == [0, 1, 2, 3, 4, 99]

    run(scene)


def test_silence_ends_at_the_deadline() -> None:
    async def scene() -> None:
        sides = Sides(answers=False)
        with pytest.raises(DeadlinePassed):
            await sides.ask(1, timeout_s=3.0)
        assert asyncio.get_running_loop().time() == pytest.approx(3.0)

    run(scene)


def test_a_dead_process_is_noticed_at_once_and_its_successor_found() -> None:
    async def scene() -> None:
        sides = Sides(answers=False)
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, sides.responder.close)
        with pytest.raises(NoHealthyNode, match="went away"):
            await sides.ask(1)
        assert loop.time() == pytest.approx(1.0)
        assert not sides.requester.send(2)
        sides._answers = True
        loop.call_later(0.5, sides.serve)
        assert await sides.ask(3) == 6

    run(scene)


def test_an_absent_peer_is_waited_for_only_so_long() -> None:
    async def scene() -> None:
        sides = Sides()
        sides.responder.close()
        await asyncio.sleep(0.1)
        with pytest.raises(NoHealthyNode, match="does not answer"):
            await sides.ask(1)
        assert asyncio.get_running_loop().time() == pytest.approx(1.0, abs=0.01)

    run(scene)


def test_what_a_short_cut_holds_back_arrives_afterwards() -> None:
    async def scene() -> None:
        sides = Sides()
        await sides.ask(0)
        sides.network.cut("g", "n")
        asyncio.get_running_loop().call_later(HEARTBEAT_TIMEOUT_S / 2, sides.network.heal, "g", "n")
        assert await asyncio.gather(sides.ask(1), sides.ask(2)) == [2, 4]
        assert asyncio.get_running_loop().time() > HEARTBEAT_TIMEOUT_S / 2

    run(scene)


def test_a_long_cut_breaks_the_connection_and_loses_what_was_under_way() -> None:
    async def scene() -> None:
        sides = Sides()
        await sides.ask(0)
        sides.network.cut("g", "n")
        with pytest.raises(NoHealthyNode):
            await sides.ask(1, timeout_s=60.0)
        assert asyncio.get_running_loop().time() == pytest.approx(HEARTBEAT_TIMEOUT_S, abs=0.1)
        sides.network.heal("g", "n")
        assert await sides.ask(2) == 4
        assert sides.heard == [0, 2]

    run(scene)


class Follower:
    def __init__(self, network: Network) -> None:
        self.seen: list[Any] = []
        self.subscriber = sockets(network, "g").subscriber(
            FEED,
            None,
            on_message=lambda number, message: self.seen.append((number, message)),
            on_gap=lambda expected, got: self.seen.append("gap"),
            on_silence=lambda: self.seen.append("silence"),
            on_return=lambda: self.seen.append("return"),
        )


def test_a_feed_is_numbered_and_says_what_was_missed() -> None:
    async def scene() -> None:
        network = Network()
        publisher = sockets(network, "n").publisher(FEED, None, epoch=7)
        publisher.publish("before anybody listened")
        follower = Follower(network)
        await asyncio.sleep(1.0)
        publisher.publish("two")
        await asyncio.sleep(1.0)
        assert follower.seen == ["return", "gap", (2, "two")]
        assert follower.subscriber.position == (7, 2)
        network.cut("g", "n")
        await asyncio.sleep(HEARTBEAT_TIMEOUT_S + 1)
        publisher.publish("three")
        network.heal("g", "n")
        await asyncio.sleep(1.0)
        assert follower.seen[3:] == ["silence", "return", "gap"]
        assert follower.subscriber.position == (7, 3)

    run(scene)


def test_a_publisher_that_restarted_is_another_epoch() -> None:
    async def scene() -> None:
        network = Network()
        first = sockets(network, "n").publisher(FEED, None, epoch=1)
        follower = Follower(network)
        await asyncio.sleep(1.0)
        first.close()
        second = sockets(network, "n").publisher(FEED, None, epoch=2)
        await asyncio.sleep(1.0)
        second.publish("hello")
        await asyncio.sleep(1.0)
        assert follower.seen == ["return", "gap", "silence", "return", "gap", (1, "hello")]

    run(scene)


def test_an_endpoint_has_one_server() -> None:
    async def scene() -> None:
        sides = Sides()
        with pytest.raises(ValueError, match="serves at"):
            sides.serve()

    run(scene)
