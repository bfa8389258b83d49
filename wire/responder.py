"""Answers to asks: the router's side."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import zmq

from .codec import MAX_MESSAGE_BYTES, Codec, MalformedMessage
from .curve import CurveKeys
from .drops import Drop, Drops
from .endpoints import BoundSocket
from .frames import ONE_WAY, Verdict, pack_answer, unpack_ask
from .outcomes import TooLarge
from .reactor import Reactor

_log = logging.getLogger(__name__)

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


class Reply(Generic[Answer]):
    """Where the answer to one ask goes: call it once, now or later, on the loop's thread.

    ``peer`` identifies the asker's connection. ``deadline`` is the loop's time until which the asker waits (infinite
    for a one-way ask). ``wanted`` is false for a one-way ask, whose reply does nothing.
    """

    __slots__ = ("_number", "_responder", "deadline", "peer")

    def __init__(self, responder: Responder[Any, Answer], peer: bytes, number: int, deadline: float) -> None:
        self._responder: Responder[Any, Answer] | None = responder
        self._number = number
        self.peer = peer
        self.deadline = deadline

    @property
    def wanted(self) -> bool:
        return self._number != ONE_WAY

    @property
    def expired(self) -> bool:
        """Whether the asker has stopped waiting."""
        return asyncio.get_running_loop().time() >= self.deadline

    def __call__(self, answer: Answer) -> bool:
        """Send ``answer``; false where it will not be received: too late, peer gone, or peer not reading.

        Raises TooLarge for an answer over the bound (the asker is told that there will be none), and RuntimeError the
        second time.
        """
        if self._number == ONE_WAY:
            return False
        responder, self._responder = self._responder, None
        if responder is None:
            raise RuntimeError("this ask was answered already")
        return responder._answer(self, answer)

    def _fail(self, verdict: Verdict) -> None:
        """Tell the asker that there will be no answer, unless it has one."""
        responder, self._responder = self._responder, None
        if responder is not None and self._number != ONE_WAY:
            responder._send(self.peer, pack_answer(self._number, verdict))


class Responder(Generic[Ask, Answer]):
    """Serves asks at ``endpoint``. Made and used on one event loop.

    ``handler(ask, reply)`` is called synchronously for each ask; what it raises is logged, counted, and ends that ask
    alone. Malformed and unknown messages are counted in ``dropped`` by reason; their sender is told, where it can be.
    With ``curve`` only the keys in ``curve.peers`` may connect. Raises InvalidRequest where it cannot serve there.
    """

    def __init__(
        self,
        endpoint: str,
        asks: Any,
        answers: Any,
        handler: Callable[[Ask, Reply[Answer]], None],
        *,
        curve: CurveKeys | None = None,
        hwm: int = 10_000,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.dropped = Drops(f"responder at {endpoint}")
        self._asks: Codec[Ask] = Codec(asks, max_bytes=max_bytes)
        self._answers: Codec[Answer] = Codec(answers, max_bytes=max_bytes)
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._bound = BoundSocket(zmq.ROUTER, endpoint, hwm=hwm, drops=self.dropped, max_bytes=max_bytes, curve=curve)
        self._reactor = Reactor(self._bound.socket, self._on_frames, allows=self._bound.allows)
        self._closed = False

    @property
    def endpoint(self) -> str:
        """Where it serves, with the port that a ``tcp://...:*`` got."""
        return self._bound.endpoint

    def allow(self, keys: Iterable[str]) -> None:
        """Let exactly these CURVE keys connect from now on, in place of ``curve.peers``: what comes over
        connections with others is dropped. Raises InvalidRequest."""
        self._bound.allow(keys)

    def close(self) -> None:
        """Stop serving. Replies still to come do nothing."""
        if not self._closed:
            self._closed = True
            self._reactor.close()
            self._bound.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self.dropped.note(Drop.BAD_FRAME, f"{len(frames) - 1} frames instead of one")
            return
        peer, frame = frames
        try:
            number, remaining_s, body = unpack_ask(frame)
        except MalformedMessage as error:
            self.dropped.note(error.reason, error)
            return
        if number != ONE_WAY and remaining_s == 0.0:
            self.dropped.note(Drop.EXPIRED, f"ask {number}")
            return
        deadline = math.inf if number == ONE_WAY else self._loop.time() + remaining_s
        reply: Reply[Answer] = Reply(self, peer, number, deadline)
        try:
            ask = self._asks.decode(body)
        except MalformedMessage as error:
            self.dropped.note(error.reason, error)
            reply._fail(Verdict.NOT_UNDERSTOOD)
            return
        try:
            self._handler(ask, reply)
        except Exception as error:
            _log.exception("the handler of %s failed", type(ask).__name__)
            self.dropped.note(Drop.HANDLER_FAILED, error)
            reply._fail(Verdict.FAILED)

    def _answer(self, reply: Reply[Answer], answer: Answer) -> bool:
        if self._loop.time() >= reply.deadline:
            self.dropped.note(Drop.EXPIRED, type(answer).__name__)
            return False
        try:
            body = self._answers.encode(answer)
        except TooLarge:
            self._send(reply.peer, pack_answer(reply._number, Verdict.FAILED))
            raise
        return self._send(reply.peer, pack_answer(reply._number, Verdict.ANSWER, body))

    def _send(self, peer: bytes, frame: bytes) -> bool:
        if self._closed:
            return False
        try:
            self._reactor.send_to(peer, frame)
        except zmq.Again:
            self.dropped.note(Drop.QUEUE_FULL, f"peer {peer.hex()} does not read its answers")
            return False
        except zmq.ZMQError as error:
            self.dropped.note(Drop.PEER_GONE, error)
            return False
        return True
