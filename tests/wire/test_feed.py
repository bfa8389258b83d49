"""Numbered feeds: what is lost is noticed, whether or not anything comes after it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.helpers import Number, closing, until
from wire.drops import Drop
from wire.feed import FeedPosition, Seen
from wire.frames import Kind, pack_feed
from wire.sockets import FeedPublisher, FeedSubscriber

EPOCH = 1_700_000_000_000


class Follower:
    """Subscribes, and keeps what it is told, in order."""

    def __init__(self, endpoint: str, silence_s: float = 60.0) -> None:
        self.told: list[object] = []
        self.socket: FeedSubscriber[Number] = FeedSubscriber(
            endpoint,
            Number,
            on_message=lambda number, message: self.told.append((number, message.value)),
            on_gap=lambda expected, got: self.told.append(("gap", expected, got)),
            on_silence=lambda: self.told.append("silence"),
            on_return=lambda: self.told.append("return"),
            silence_s=silence_s,
        )

    def close(self) -> None:
        self.socket.close()


class RawPublisher:
    """Puts any frame on the wire; a follower is listening when this was made."""

    def __init__(self, endpoint: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self.socket.linger = 0
        Path(endpoint.removeprefix("ipc://")).parent.mkdir(exist_ok=True)
        self.socket.bind(endpoint)

    async def subscribed(self) -> None:
        await until(lambda: bool(self.socket.poll(0)))
        self.socket.recv()

    def message(self, number: int, epoch: int = EPOCH) -> None:
        self.socket.send(pack_feed(epoch, number, Kind.MESSAGE, msgspec.msgpack.encode(Number(number * 10))))

    def heartbeat(self, number: int, epoch: int = EPOCH) -> None:
        self.socket.send(pack_feed(epoch, number, Kind.HEARTBEAT))

    def close(self) -> None:
        self.socket.close()


@contextmanager
def raw_feed(endpoint: str, silence_s: float = 60.0) -> Iterator[tuple[RawPublisher, Follower]]:
    publisher = RawPublisher(endpoint)
    follower = Follower(endpoint, silence_s)
    with closing(publisher, follower):
        yield publisher, follower


async def test_messages_come_numbered_in_order_after_one_notice_of_the_new_epoch(endpoint: str) -> None:
    publisher = FeedPublisher(endpoint, Number, epoch=EPOCH, heartbeat_s=0.02)
    follower = Follower(endpoint)
    with closing(publisher, follower):
        await until(lambda: follower.told == ["return", ("gap", 1, 1)])
        assert not follower.socket.silent
        assert [publisher.publish(Number(value)) for value in range(100)] == list(range(1, 101))
        await until(lambda: len(follower.told) == 102)
        assert follower.told[2:] == [(value + 1, value) for value in range(100)]


async def test_whoever_joins_late_is_told_that_it_missed_the_beginning(endpoint: str) -> None:
    publisher = FeedPublisher(endpoint, Number, epoch=EPOCH, heartbeat_s=0.02)
    for value in range(5):
        publisher.publish(Number(value))
    follower = Follower(endpoint)
    with closing(publisher, follower):
        await until(lambda: follower.told == ["return", ("gap", 1, 6)])


async def test_a_lost_message_is_told_once_before_the_next(endpoint: str) -> None:
    with raw_feed(endpoint) as (publisher, follower):
        await publisher.subscribed()
        for number in (1, 2, 5, 6):
            publisher.message(number)
        await until(lambda: (6, 60) in follower.told)
        assert follower.told == ["return", ("gap", 1, 1), (1, 10), (2, 20), ("gap", 3, 5), (5, 50), (6, 60)]


async def test_the_loss_of_the_last_message_is_told_by_a_heartbeat(endpoint: str) -> None:
    with raw_feed(endpoint) as (publisher, follower):
        await publisher.subscribed()
        publisher.message(1)
        for _ in range(3):
            publisher.heartbeat(3)
        publisher.message(4)
        await until(lambda: (4, 40) in follower.told)
        assert follower.told == ["return", ("gap", 1, 1), (1, 10), ("gap", 2, 4), (4, 40)]


async def test_another_life_of_the_publisher_is_told(endpoint: str) -> None:
    with raw_feed(endpoint) as (publisher, follower):
        await publisher.subscribed()
        publisher.message(1)
        publisher.message(1, epoch=EPOCH + 1)
        publisher.message(2, epoch=EPOCH + 1)
        publisher.heartbeat(0, epoch=EPOCH + 2)
        publisher.message(1, epoch=EPOCH + 2)
        await until(lambda: len(follower.told) == 8)
        assert follower.told[1:] == [
            ("gap", 1, 1), (1, 10), ("gap", 1, 1), (1, 10), (2, 20), ("gap", 1, 1), (1, 10)
        ]  # fmt: skip


async def test_what_was_seen_already_is_dropped(endpoint: str) -> None:
    with raw_feed(endpoint) as (publisher, follower):
        await publisher.subscribed()
        for number in (1, 2, 1, 2, 3):
            publisher.message(number)
        await until(lambda: (3, 30) in follower.told)
        assert follower.told[2:] == [(1, 10), (2, 20), (3, 30)]
        assert follower.socket.dropped[Drop.STALE_NUMBER] == 2


async def test_garbage_is_counted_and_leaves_a_gap(endpoint: str) -> None:
    with raw_feed(endpoint) as (publisher, follower):
        await publisher.subscribed()
        publisher.message(1)
        publisher.socket.send(b"not a feed")
        publisher.socket.send(pack_feed(EPOCH, 2, Kind.MESSAGE, b"\xc1"))
        publisher.socket.send(pack_feed(EPOCH, 3, Kind.MESSAGE, msgspec.msgpack.encode({"t": "Later"})))
        publisher.message(4)
        await until(lambda: (4, 40) in follower.told)
        assert follower.told[2:] == [(1, 10), ("gap", 2, 4), (4, 40)]
        assert follower.socket.dropped == {Drop.BAD_FRAME: 1, Drop.UNDECODABLE: 1, Drop.UNKNOWN: 1}


async def test_silence_is_told_once_and_so_is_the_return(endpoint: str) -> None:
    with raw_feed(endpoint, silence_s=0.2) as (publisher, follower):
        await publisher.subscribed()
        publisher.message(1)
        await until(lambda: follower.told[-1:] == ["silence"])
        await asyncio.sleep(0.5)
        assert follower.told.count("silence") == 1
        assert follower.socket.silent
        publisher.message(2)
        await until(lambda: follower.told[-2:] == ["return", (2, 20)])


async def test_a_publisher_that_goes_is_silent_at_once_and_heard_when_it_is_back(endpoint: str) -> None:
    publisher = FeedPublisher(endpoint, Number, epoch=1, heartbeat_s=0.02)
    follower = Follower(endpoint, silence_s=3600.0)
    with closing(follower):
        await until(lambda: ("gap", 1, 1) in follower.told)
        publisher.close()
        await until(lambda: follower.told[-1] == "silence")
        publisher = FeedPublisher(endpoint, Number, epoch=2, heartbeat_s=0.02)
        await until(lambda: follower.told[-2:] == ["return", ("gap", 1, 1)])
        publisher.publish(Number(5))
        await until(lambda: follower.told[-1] == (1, 5))
        publisher.close()


async def test_a_slow_subscriber_loses_messages_and_knows_which(endpoint: str) -> None:
    publisher = FeedPublisher(endpoint, Number, epoch=EPOCH, heartbeat_s=0.02, hwm=10)
    follower = Follower(endpoint)
    with closing(publisher, follower):
        await until(lambda: ("gap", 1, 1) in follower.told)
        # in one turn of the loop, so that the subscriber cannot read meanwhile
        for value in range(20_000):
            publisher.publish(Number(value, padding=bytes(2000)))
        await until(lambda: follower.socket._position.next == 20_001)
        numbers = [told[0] for told in follower.told[2:] if isinstance(told, tuple) and told[0] != "gap"]
        lost = [told for told in follower.told[2:] if isinstance(told, tuple) and told[0] == "gap"]
        assert 0 < len(numbers) < 20_000
        assert numbers == sorted(set(numbers))
        accounted = len(numbers) + sum(got - expected for _, expected, got in lost)
        assert accounted == 20_000


async def test_a_failing_callback_does_not_end_the_feed(endpoint: str) -> None:
    seen: list[int] = []

    def fail_on_odd(number: int, message: Number) -> None:
        if number % 2:
            raise ZeroDivisionError("a bug in the follower")
        seen.append(number)

    publisher = RawPublisher(endpoint)
    subscriber = FeedSubscriber(endpoint, Number, on_message=fail_on_odd, on_gap=lambda expected, got: None)
    with closing(publisher, subscriber):
        await publisher.subscribed()
        for number in range(1, 7):
            publisher.message(number)
        await until(lambda: seen == [2, 4, 6])
        assert subscriber.dropped[Drop.HANDLER_FAILED] == 3


async def test_a_subscriber_may_close_from_its_own_callback(endpoint: str) -> None:
    publisher = RawPublisher(endpoint)
    seen: list[int] = []

    def close_at_once(number: int, message: Number) -> None:
        seen.append(number)
        subscriber.close()

    subscriber = FeedSubscriber(endpoint, Number, on_message=close_at_once, on_gap=lambda expected, got: None)
    with closing(publisher):
        await publisher.subscribed()
        for number in range(1, 4):
            publisher.message(number)
        await until(lambda: bool(seen))
        await asyncio.sleep(0.05)
        assert seen == [1]


@given(st.lists(st.booleans(), max_size=40), st.lists(st.integers(0, 40), max_size=10))
def test_any_pattern_of_loss_is_told_exactly(kept: list[bool], heartbeats_after: list[int]) -> None:
    position = FeedPosition()
    assert position.see(EPOCH, 0, Kind.HEARTBEAT) is Seen.GAP
    missing: set[int] = set()
    received: list[int] = []
    for number, arrives in enumerate(kept, start=1):
        frames = [Kind.MESSAGE] * arrives + [Kind.HEARTBEAT] * heartbeats_after.count(number)
        for kind in frames:
            expected = position.next
            seen = position.see(EPOCH, number, kind)
            newest = number if kind is Kind.HEARTBEAT else number - 1
            lost = range(expected, newest + 1)
            assert (seen is Seen.GAP) == bool(lost)
            assert missing.isdisjoint(lost)
            missing.update(lost)
            if kind is Kind.MESSAGE:
                received.append(number)
    assert received == [number for number, arrives in enumerate(kept, start=1) if arrives]
    assert missing | set(received) == set(range(1, position.next))
    assert missing.isdisjoint(received)
