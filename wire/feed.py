"""Numbered feeds: one publisher, many subscribers, nothing lost unnoticed."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import zmq

from .codec import MAX_MESSAGE_BYTES, Codec, MalformedMessage
from .curve import CurveKeys
from .drops import Drop, Drops
from .endpoints import BoundSocket, connecting_socket
from .frames import Kind, pack_feed, unpack_feed
from .link import Link
from .outcomes import RoostError
from .reactor import Reactor

_log = logging.getLogger(__name__)

M = TypeVar("M")


class FeedPublisher(Generic[M]):
    """Publishes messages numbered from 1 within ``epoch``, which no other life of this publisher may have had.

    Heartbeats carry the newest number, so that a subscriber notices the loss of the last message too. A subscriber that
    does not keep up loses messages (``hwm`` bounds its queue), and knows. Made and used on one event loop.
    Raises InvalidRequest where it cannot serve there.
    """

    def __init__(
        self,
        endpoint: str,
        messages: Any,
        *,
        epoch: int,
        heartbeat_s: float = 1.0,
        curve: CurveKeys | None = None,
        hwm: int = 10_000,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.epoch = epoch
        self.number = 0
        self.dropped = Drops(f"publisher at {endpoint}")
        self._codec: Codec[M] = Codec(messages, max_bytes=max_bytes)
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._bound = BoundSocket(zmq.PUB, endpoint, hwm=hwm, drops=self.dropped, max_bytes=max_bytes, curve=curve)
        self._timer = self._loop.call_later(heartbeat_s, self._heartbeat)
        self._closed = False

    @property
    def endpoint(self) -> str:
        """Where it serves, with the port that a ``tcp://...:*`` got."""
        return self._bound.endpoint

    def publish(self, message: M) -> int:
        """Send ``message`` to whoever listens; its number. Raises TooLarge, and then the number is not used."""
        body = self._codec.encode(message)
        self.number += 1
        self._bound.socket.send(pack_feed(self.epoch, self.number, Kind.MESSAGE, body), zmq.NOBLOCK)
        return self.number

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._timer.cancel()
            self._bound.close()

    def _heartbeat(self) -> None:
        self._timer = self._loop.call_later(self._heartbeat_s, self._heartbeat)
        self._bound.socket.send(pack_feed(self.epoch, self.number, Kind.HEARTBEAT), zmq.NOBLOCK)


class Seen(enum.Enum):
    """What a feed's frame is to a subscriber that has seen those before it."""

    NEXT = enum.auto()
    GAP = enum.auto()
    STALE = enum.auto()


class FeedPosition:
    """Where a subscriber stands in a feed. Pure: numbers in, verdicts out.

    ``next`` is the number that the next message must have; ``epoch`` is None before anything was seen.
    """

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.next = 1

    def see(self, epoch: int, number: int, kind: Kind) -> Seen:
        """Take notice of a frame. GAP also for the first frame of an epoch, of which nothing is known yet.

        After a GAP at a heartbeat ``next`` is past all that was lost, so that one loss is told once.
        """
        if epoch != self.epoch:
            self.epoch, self.next = epoch, number + 1
            return Seen.GAP
        newest = number if kind is Kind.HEARTBEAT else number - 1
        expected = self.next
        self.next = max(expected, number + 1)
        if newest >= expected:
            return Seen.GAP
        return Seen.NEXT if newest == expected - 1 else Seen.STALE


class FeedSubscriber(Generic[M]):
    """Follows a feed. Made and used on one event loop; reconnects by itself for as long as it lives.

    ``on_message(number, message)`` gets messages in order. ``on_gap(expected, got)`` says, before the next message,
    that numbers ``expected`` to ``got - 1`` were lost, or that this is an epoch not seen before (the first one too, so
    that whoever follows asks for full state at a time when no later message can be missed). ``on_silence()`` says that
    nothing, heartbeats included, came for ``silence_s`` seconds or that the connection broke; ``on_return()`` that the
    feed is heard (again). What a callback raises is logged and counted in ``dropped``, as are malformed messages.
    """

    def __init__(
        self,
        endpoint: str,
        messages: Any,
        *,
        on_message: Callable[[int, M], None],
        on_gap: Callable[[int, int], None],
        on_silence: Callable[[], None] | None = None,
        on_return: Callable[[], None] | None = None,
        silence_s: float = 5.0,
        curve: CurveKeys | None = None,
        server_public: str = "",
        hwm: int = 10_000,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.endpoint = endpoint
        self.silent = True
        """Whether nothing is heard: at first, and after silence."""
        self.dropped = Drops(f"subscriber of {endpoint}")
        self._codec: Codec[M] = Codec(messages, max_bytes=max_bytes)
        self._on_message = on_message
        self._on_gap = on_gap
        self._on_silence = on_silence
        self._on_return = on_return
        self._silence_s = silence_s
        self._position = FeedPosition()
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._closed = False
        self._socket = connecting_socket(
            zmq.SUB, hwm=hwm, max_bytes=max_bytes, curve=curve, server_public=server_public
        )
        self._socket.subscribe(b"")
        self._reactor = Reactor(self._socket, self._on_frames)
        try:
            self._link = Link(self._socket, endpoint, drops=self.dropped, on_up=_nothing, on_down=self._on_peer_gone)
        except RoostError:
            self._reactor.close()
            self._socket.close()
            raise
        self._timer = self._loop.call_later(silence_s, self._listen)

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, number) of the newest message that was heard, or heard of; (0, 0) before any frame."""
        return self._position.epoch or 0, self._position.next - 1

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._timer.cancel()
            self._link.close()
            self._reactor.close()
            self._socket.close(linger=0)

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            epoch, number, kind, body = unpack_feed(frames[-1])
            message = self._codec.decode(body) if kind is Kind.MESSAGE else None
        except MalformedMessage as error:
            # its number stays unseen: the next frame finds a gap, and whoever follows repairs it
            self.dropped.note(error.reason, error)
            return
        self._heard_at = self._loop.time()
        if self.silent:
            self.silent = False
            self._tell(self._on_return)
        expected = self._position.next if epoch == self._position.epoch else 1
        seen = self._position.see(epoch, number, kind)
        if seen is Seen.GAP:
            self._tell(self._on_gap, expected, self._position.next if message is None else number)
        if seen is Seen.STALE and message is not None:
            self.dropped.note(Drop.STALE_NUMBER, number)
        elif message is not None:
            self._tell(self._on_message, number, message)

    def _on_peer_gone(self) -> None:
        self._reactor.drain()
        self._fall_silent()

    def _listen(self) -> None:
        quiet_s = self._loop.time() - self._heard_at
        if quiet_s >= self._silence_s:
            self._fall_silent()
            quiet_s = 0.0
        self._timer = self._loop.call_later(self._silence_s - quiet_s, self._listen)

    def _fall_silent(self) -> None:
        if not self.silent:
            self.silent = True
            self._tell(self._on_silence)

    def _tell(self, callback: Callable[..., None] | None, *args: object) -> None:
        if callback is None or self._closed:
            return
        try:
            callback(*args)
        except Exception as error:
            _log.exception("a subscriber of %s failed", self.endpoint)
            self.dropped.note(Drop.HANDLER_FAILED, error)


def _nothing() -> None:
    """Feeds learn that their peer is back from what it sends."""
