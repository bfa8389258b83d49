"""Keeps one connecting socket connected, and says when its peer comes and goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from .drops import Drop, Drops
from .endpoints import Socket, no_more_sockets
from .outcomes import InvalidRequest
from .reactor import Reactor

_log = logging.getLogger(__name__)

# libzmq gives a connection up for good after a refused key or an oversized message; dialling anew is up to us
_REDIAL_S = 3.0
_FAILED = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | _FAILED


class Link:
    """Connects ``socket`` to ``endpoint``; ``on_up`` and ``on_down`` are called on changes.

    ``up`` is true between the end of a handshake and the loss of the connection; ``down_since`` is the loop's time.
    Raises InvalidRequest for an endpoint that is not ZeroMQ's, NoHealthyNode where this process can have no more
    sockets.
    """

    def __init__(
        self, socket: Socket, endpoint: str, *, drops: Drops, on_up: Callable[[], None], on_down: Callable[[], None]
    ) -> None:
        self._socket = socket
        self._endpoint = endpoint
        self._drops = drops
        self._on_up = on_up
        self._on_down = on_down
        self._loop = asyncio.get_running_loop()
        self.up = False
        self.down_since = self._loop.time()
        try:
            self._monitor: Socket = socket.get_monitor_socket(int(_EVENTS))
        except zmq.ZMQError as error:
            socket.disable_monitor()
            raise no_more_sockets(error) from None
        self._reactor = Reactor(self._monitor, self._on_event)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._stop_monitor()
            raise InvalidRequest(f"cannot connect to {endpoint}: {error}", field="endpoint") from None
        self._redial_timer = self._loop.call_later(_REDIAL_S, self._redial)

    def look(self) -> None:
        """Take notice of changes that the loop has not come to yet."""
        self._reactor.drain()

    def close(self) -> None:
        self.up = False
        self._redial_timer.cancel()
        self._stop_monitor()

    def _stop_monitor(self) -> None:
        self._reactor.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _on_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._redial_timer.cancel()
            self.up = True
            # takes notice of the new connection: a send that comes first could still find nobody there
            self._socket.get(zmq.EVENTS)
            self._on_up()
            return
        if event & _FAILED:
            self._drops.note(Drop.PEER_REFUSED, f"handshake with {self._endpoint} failed")
        if self.up:
            self.up = False
            self.down_since = self._loop.time()
            self._redial_timer = self._loop.call_later(_REDIAL_S, self._redial)
            self._on_down()

    def _redial(self) -> None:
        self._redial_timer = self._loop.call_later(_REDIAL_S, self._redial)
        try:
            self._socket.disconnect(self._endpoint)
        except zmq.ZMQError as error:
            _log.debug("nothing to disconnect from %s: %s", self._endpoint, error)
        self._socket.connect(self._endpoint)
