"""Asks with deadlines: the dealer's side."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

import zmq

from .codec import MAX_MESSAGE_BYTES, Codec, MalformedMessage
from .curve import CurveKeys
from .drops import Drop, Drops
from .endpoints import connecting_socket
from .frames import LONGEST_DEADLINE_S, ONE_WAY, Verdict, pack_ask, unpack_answer
from .link import Link
from .outcomes import DeadlinePassed, NoHealthyNode, RoostError
from .reactor import Reactor

# errors tell no shorter time
_MOMENT_S = 0.001

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


class Requester(Generic[Ask, Answer]):
    """Asks one responder, many asks in flight at a time. Made and used on one event loop.

    ``asks`` and ``answers`` are unions of tagged structs. ``gone`` is the error raised where the peer is not there,
    does not keep up or cannot answer; ``lost``, if given, where it went away with an ask that it may have acted upon.
    An absent peer is waited for until ``patience_s`` after it went (or after this
    was made), then asks fail at once until it is back. Reconnects by itself for as long as it lives.
    ``hwm`` bounds the asks in flight and the queue towards the peer. What is dropped is counted in ``dropped``.
    ``peer`` is what errors call it: they may travel further than its address should.
    """

    def __init__(
        self,
        endpoint: str,
        asks: Any,
        answers: Any,
        *,
        peer: str = "the peer",
        curve: CurveKeys | None = None,
        server_public: str = "",
        hwm: int = 10_000,
        gone: type[RoostError] = NoHealthyNode,
        lost: type[RoostError] | None = None,
        patience_s: float = 1.0,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.endpoint = endpoint
        self._peer = peer
        self.dropped = Drops(f"requester of {endpoint}")
        self._asks: Codec[Ask] = Codec(asks, max_bytes=max_bytes)
        self._answers: Codec[Answer] = Codec(answers, max_bytes=max_bytes)
        self._hwm = hwm
        self._gone = gone
        self._lost = lost or gone
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._last_number = ONE_WAY
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._came_up = asyncio.Event()
        self._closed = False
        self._socket = connecting_socket(
            zmq.DEALER, hwm=hwm, max_bytes=max_bytes, curve=curve, server_public=server_public
        )
        # no queue towards an absent peer: it would be handed stale asks when it comes back
        self._socket.immediate = True
        self._reactor = Reactor(self._socket, self._on_frames)
        try:
            self._link = Link(
                self._socket, endpoint, drops=self.dropped, on_up=self._came_up.set, on_down=self._on_peer_gone
            )
        except RoostError:
            self._reactor.close()
            self._socket.close()
            raise

    @property
    def connected(self) -> bool:
        """Whether the peer is there, as far as the connection knows."""
        return self._link.up

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    async def request(self, ask: Ask, *, timeout_s: float) -> Answer:
        """The peer's answer to ``ask``; the time left travels with it.

        Raises DeadlinePassed after ``timeout_s``; the class given as ``gone`` at once where the peer is not there, goes
        away while we wait, says that it cannot answer, or where a queue is full; TooLarge for an ask over the bound.
        """
        body = self._asks.encode(ask)
        deadline = self._loop.time() + min(timeout_s, LONGEST_DEADLINE_S)
        if not self._link.up:
            await self._wait_for_peer(deadline)
        if len(self._waiting) >= self._hwm:
            self.dropped.note(Drop.QUEUE_FULL)
            raise self._gone(f"{self._peer} has {self._hwm} requests in flight, the most that are allowed")
        remaining_s = deadline - self._loop.time()
        if remaining_s <= 0:
            raise self._deadline_passed(timeout_s)
        self._last_number = number = self._last_number + 1
        self._put(pack_ask(number, remaining_s, body))
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[number] = answer
        timer = self._loop.call_later(remaining_s, self._on_deadline, number, timeout_s)
        try:
            return await answer
        finally:
            timer.cancel()
            self._waiting.pop(number, None)

    def send(self, ask: Ask) -> bool:
        """Send ``ask`` one way. Best effort: false, and counted, where the peer is away or its queue is full."""
        body = self._asks.encode(ask)
        if not self._link.up:
            self.dropped.note(Drop.PEER_GONE)
            return False
        try:
            self._reactor.send(pack_ask(ONE_WAY, 0.0, body))
        except zmq.Again:
            self.dropped.note(Drop.QUEUE_FULL)
            return False
        return True

    def close(self) -> None:
        """Fail what is in flight and free the socket. What was sent just before may be lost."""
        if not self._closed:
            self._closed = True
            self._link.close()
            self._reactor.close()
            self._socket.close(linger=0)
            # wakes whoever waits for the peer, to be told the same
            self._came_up.set()
            self._fail_all(f"the connection to {self._peer} was closed")

    def _put(self, frame: bytes) -> None:
        try:
            self._reactor.send(frame)
        except zmq.Again:
            # a peer that has just gone looks the same as a full queue
            self._link.look()
            reason = Drop.QUEUE_FULL if self._link.up else Drop.PEER_GONE
            self.dropped.note(reason)
            raise self._gone(f"cannot send to {self._peer}: {reason}") from None

    async def _wait_for_peer(self, deadline: float) -> None:
        patient_until = self._link.down_since + self._patience_s
        try:
            async with asyncio.timeout_at(min(deadline, patient_until)):
                await self._came_up.wait()
        except TimeoutError:
            if deadline <= patient_until:
                raise self._deadline_passed(None) from None
            raise self._gone(f"{self._peer} does not answer") from None
        if self._closed:
            raise self._gone(f"the connection to {self._peer} was closed")

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            number, verdict, body = unpack_answer(frames[-1])
            message = self._answers.decode(body) if verdict is Verdict.ANSWER else None
        except MalformedMessage as error:
            self.dropped.note(error.reason, error)
            return
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            self.dropped.note(Drop.LATE_ANSWER, f"ask {number}")
        elif message is not None:
            answer.set_result(message)
        else:
            why = "did not understand the request" if verdict is Verdict.NOT_UNDERSTOOD else "failed on the request"
            answer.set_exception(self._gone(f"{self._peer} {why}"))

    def _on_deadline(self, number: int, timeout_s: float) -> None:
        answer = self._waiting.get(number)
        if answer is not None and not answer.done():
            answer.set_exception(self._deadline_passed(timeout_s))

    def _on_peer_gone(self) -> None:
        self._came_up.clear()
        # answers that came before the connection broke still count
        self._reactor.drain()
        self._fail_all(f"{self._peer} went away")

    def _fail_all(self, message: str) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._lost(message))

    def _deadline_passed(self, timeout_s: float | None) -> DeadlinePassed:
        within = "in time" if timeout_s is None else f"within {round(max(timeout_s, _MOMENT_S), 3):g} s"
        return DeadlinePassed(f"no answer from {self._peer} {within}")
