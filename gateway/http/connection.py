"""One client connection: reads requests, serves them in order, one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from gateway.http.answers import CONTINUE, Refusal, error_answer, error_body, refusal_answer, response_head
from gateway.http.control import ControlLane
from gateway.http.exchange import Exchange
from gateway.http.half_closed import HalfClosedWatch
from gateway.http.headers import Pair
from gateway.http.limits import HttpLimits
from gateway.http.reader import Message, RequestReader
from wire.outcomes import Outcome, RoostError

log = logging.getLogger(__name__)

DataHandler = Callable[[Exchange], Awaitable[None]]

FOREVER = float("inf")
# The parser cannot be stopped in the middle of what it was given, so it is given little at once: at most this much is
# parsed ahead of the request being served.
SLICE_BYTES = 16384
# What a client may send ahead before it is no longer read. Below this, its leaving is still noticed at once.
AHEAD_BYTES = 65536

_BROKEN = (500, [(b"content-type", b"application/json")], error_body("internal_error", "the gateway failed"))


class Front(Protocol):
    """The server that a connection belongs to."""

    limits: HttpLimits
    data_routes: frozenset[tuple[bytes, bytes]]
    handler: DataHandler
    closing: bool
    running: set[asyncio.Task[None]]

    def joined(self, connection: ClientConnection) -> bool: ...

    def left(self, connection: ClientConnection) -> None: ...

    def refusing(self, refusal: Refusal) -> None: ...

    def control_protocol(self) -> asyncio.Protocol: ...


class ClientConnection(asyncio.Protocol):
    """``deadline`` is when, in loop time, the client must have done what is expected of it: then ``expire`` is due."""

    def __init__(self, front: Front) -> None:
        self.deadline = FOREVER
        self.writing_paused = False
        self._front = front
        self._limits = front.limits
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(front.data_routes, front.limits)
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._exchange: Exchange | None = None  # the data request being served
        self._task: asyncio.Task[None] | None = None
        self._control: Message | None = None  # the control request being served
        self._lane: ControlLane | None = None
        self._ahead = bytearray()
        self._reading = True
        self._half_read = False
        self._span_began_with = 0  # bytes of body that had come when the current span of body_timeout_s began
        self._unsent = 0
        self._discarded = 0
        self._half_closed: HalfClosedWatch | None = None
        self._ended = False  # the client sends no more
        self._closing = False

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self._peer = peer[0] if peer else ""
        self._expect_within(self._limits.head_timeout_s)
        if not self._front.joined(self):
            self._turn_away(Refusal(429, "connections", "too many connections are open", Outcome.QUOTA))
        elif self._front.closing:
            self._close()  # accepted just before the listener closed

    def data_received(self, data: bytes) -> None:
        if self._closing:
            self._discard(len(data))
        elif not self._ahead and len(data) <= SLICE_BYTES and not self._busy:
            self._reader.feed(data)
            self._advance()
        else:
            self._ahead += data
            self._catch_up()

    def eof_received(self) -> bool:
        """The client sends no more; the transport stays open while an answer is due."""
        self._ended = True
        if not self._ahead:
            self._reader.cut_off()
            self._advance()
        if self._serving:
            self._watch_half_closed()
        return self._serving or self.writing_paused

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._closing = True
        self.deadline = FOREVER
        self._ahead.clear()
        if self._half_closed is not None:
            self._half_closed.stop()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_gone()
            if self._task is not None:
                self._task.cancel()
        if self._lane is not None:
            self._lane.lost(exc)
        self._front.left(self)

    def pause_writing(self) -> None:
        self.writing_paused = True
        self._rearm()
        self._tell_writing_paused()

    def resume_writing(self) -> None:
        self.writing_paused = False
        self._tell_writing_paused()
        if not self._closing:
            self._rearm()
            self._catch_up()

    def _tell_writing_paused(self) -> None:
        if self._exchange is not None:
            self._exchange.set_writing_paused(self.writing_paused)
        if self._lane is not None:
            self._lane.set_writing_paused(self.writing_paused)

    # reading

    @property
    def _serving(self) -> bool:
        return self._exchange is not None or self._control is not None

    @property
    def _busy(self) -> bool:
        """No further bytes may be parsed now."""
        control = self._control
        if control is not None:
            return control.complete or self._lane is None or not self._lane.reading
        return self._exchange is not None or self.writing_paused

    def _catch_up(self) -> None:
        """Serve what was read, and parse what was kept, as far as may be."""
        self._advance()
        while self._ahead and not self._busy and not self._closing:
            part = bytes(self._ahead[:SLICE_BYTES])
            del self._ahead[:SLICE_BYTES]
            self._reader.feed(part)
            if self._ended and not self._ahead:
                self._reader.cut_off()
            self._advance()
        if not self._closing:
            self._set_reading(len(self._ahead) <= AHEAD_BYTES)
            if self._ended and not self._serving and not self.writing_paused:
                self._close()

    def _set_reading(self, on: bool) -> None:
        if on != self._reading and self._transport is not None and not self._ended:
            self._reading = on
            if on:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _discard(self, size: int) -> None:
        self._discarded += size
        if self._discarded > 2 * self._limits.max_body_bytes:
            self._set_reading(False)

    # serving

    def _advance(self) -> None:
        """Serve the next request, if it is there and its turn has come."""
        if self._control is not None:
            self._forward_control(self._control)
        if self._closing or self._serving or self.writing_paused:
            return
        messages = self._reader.messages
        if messages:
            message = messages[0]
            if message.refusal is not None:
                self._turn_away(message.refusal)
                return
            if message.control or message.complete:
                messages.popleft()
                self._serve(message)
                return
            if message.expects_continue:
                message.expects_continue = False
                self._write(CONTINUE)
        if not self._half_read and not self._reader.between:
            self._half_read = True
            self._rearm()

    def _serve(self, message: Message) -> None:
        assert self._transport is not None
        self._half_read = False
        if message.control:
            self._control = message
            if self._lane is None:
                self._lane = ControlLane(self._front.control_protocol(), self, self._transport)
            self._rearm()
            self._lane.begin(message, closing=not self.keeps_alive(message))
        else:
            self.deadline = FOREVER
            exchange = Exchange(message, self, self._transport, self._loop, self._peer)
            self._exchange = exchange
            self._task = task = self._loop.create_task(self._run(exchange))
            self._front.running.add(task)
        if self._ended:
            self._watch_half_closed()

    async def _run(self, exchange: Exchange) -> None:
        answer: tuple[int, list[Pair], bytes] | None = None
        try:
            await self._front.handler(exchange)
        except RoostError as error:
            answer = error_answer(error)
        except asyncio.CancelledError:
            exchange.abort()
            raise
        except Exception:
            log.exception("the handler of %s failed", exchange.path)
            answer = _BROKEN
        finally:
            self._front.running.discard(asyncio.current_task())
        if answer is not None and not exchange.started and not exchange.finished:
            exchange.respond(*answer)
        else:
            exchange.abort()

    def _forward_control(self, message: Message) -> None:
        lane = self._lane
        assert lane is not None
        if message.refusal is None:
            lane.forward()
            return
        # The body turned out bad while aiohttp was reading it.
        self._control = None
        lane.lost(ConnectionResetError(message.refusal.message))
        if lane.begun:
            self._abort()
        else:
            self._turn_away(message.refusal)

    # for exchanges and lanes

    def keeps_alive(self, message: Message) -> bool:
        """Another request may follow ``message`` on this connection."""
        return message.keep_alive and not self._front.closing and not (self._ended and not self._has_more)

    @property
    def _has_more(self) -> bool:
        """The client has sent bytes behind the request being served."""
        return bool(self._ahead) or bool(self._reader.messages) or not self._reader.between

    def answer_over(self, *, keep_alive: bool) -> None:
        """The answer has been handed to the transport."""
        self._exchange = self._control = self._task = None
        if self._half_closed is not None:
            self._half_closed.stop()
            self._half_closed = None
        if self._closing:
            return
        if not keep_alive or self._front.closing:
            self._close()
            return
        self._rearm()
        if self._ended or self._has_more or not self._reading:
            self._catch_up()

    def answer_broken(self, *, flush: bool) -> None:
        """The answer ends here. ``flush``: the client can tell that it is not whole, so what was written may go out."""
        self._exchange = self._task = None
        if flush and not self._closing:
            self._close()
        else:
            self._abort()

    def lane_closed(self) -> None:
        """aiohttp wants the connection closed."""
        self._control = None
        if not self._closing:
            self._close()

    def lane_ready(self) -> None:
        """aiohttp takes more of the body."""
        if not self._closing:
            self._rearm()
            self._catch_up()

    # time

    def expire(self) -> None:
        """``deadline`` has passed."""
        transport = self._transport
        if transport is None:
            return
        unsent = transport.get_write_buffer_size()
        if unsent and (self.writing_paused or self._closing):
            if unsent >= self._unsent:
                self._abort()
            else:
                self._rearm()
        elif self._closing:
            self._abort()
        elif self._body_keeps_up():
            self._rearm()
        elif self._half_read or self._control is not None:
            self._reader.time_out()
            self._advance()
        else:
            self._close()

    def _body_keeps_up(self) -> bool:
        message = self._reader.unfinished
        if message is None:
            return False
        came = message.received - self._span_began_with
        return came >= self._limits.min_body_rate * self._limits.body_timeout_s

    def _rearm(self) -> None:
        """Expect of the client what is its turn to do."""
        unfinished = self._reader.unfinished
        if self.writing_paused or self._closing:
            assert self._transport is not None
            self._unsent = self._transport.get_write_buffer_size()
            self._expect_within(self._limits.stall_s)
        elif self._exchange is not None or (self._control is not None and self._busy):
            self.deadline = FOREVER
        elif unfinished is not None:
            self._span_began_with = unfinished.received
            self._expect_within(self._limits.body_timeout_s)
        elif self._half_read:
            self._expect_within(self._limits.head_timeout_s)
        else:
            self._expect_within(self._limits.keep_alive_s)

    def _expect_within(self, seconds: float) -> None:
        self.deadline = self._loop.time() + seconds

    # ending

    def close_if_idle(self) -> None:
        """The server is closing: a connection that serves nothing goes now, the others after their answer."""
        if not self._serving and not self._closing:
            self._close()

    def give_up(self) -> None:
        """Close without waiting for anything."""
        self._abort()

    def _turn_away(self, refusal: Refusal) -> None:
        """Answer a request that no handler sees, and let the client read that answer before the connection is closed.

        Bytes behind the request are read for a while: unread ones would cause a reset, which can take the answer away.
        """
        self._front.refusing(refusal)
        status, headers, body = refusal_answer(refusal)
        self._write(response_head(status, headers, b"content-length: %d\r\nconnection: close\r\n" % len(body)) + body)
        self._closing = True
        self._ahead.clear()
        transport = self._transport
        if transport is None:
            return
        if self._ended:
            self._close()
            return
        self._set_reading(True)
        transport.write_eof()
        self._unsent = transport.get_write_buffer_size()
        self._expect_within(self._limits.linger_s)

    def _close(self) -> None:
        """Close once what was written has been sent."""
        self._closing = True
        self._ahead.clear()
        if self._transport is not None:
            self._rearm()
            self._transport.close()

    def _abort(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _watch_half_closed(self) -> None:
        if self._transport is not None:
            self._half_closed = HalfClosedWatch(self._transport, self._may_probe, self._abort)

    def _may_probe(self) -> bool:
        """An interim response may be sent: nothing of the answer was, and the client speaks HTTP/1.1."""
        if self._exchange is not None:
            return self._exchange.takes_interim
        return self._control is not None and not self._control.old and self._lane is not None and not self._lane.begun
