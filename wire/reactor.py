"""A plain ZeroMQ socket on the event loop.

``zmq.asyncio`` costs a future and a poll a message; a reader on the socket's file descriptor costs one callback for all
that has arrived. The descriptor is edge-triggered: it tells once that something changed, and any call on the socket may
swallow that signal. So: read until nothing is left, look again after every send, and have a slow watchdog look as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

_WATCHDOG_S = 0.1
# messages handled before the loop's other work gets a turn
_BATCH = 64
# ours have one or two, those of ZAP seven; a peer that sends more is not made welcome with memory
_MAX_FRAMES = 8


class Reactor:
    """Delivers what ``socket`` receives to ``on_frames``, in order, on the loop that runs when it is made.

    With ``allows``, of a socket with CURVE, only what comes from a key that it is true of.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_frames: Callable[[list[bytes]], None],
        *,
        allows: Callable[[str], bool] | None = None,
    ) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._allows = allows
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.get(zmq.FD))
        self._look_due = False
        self._draining = False
        self._closed = False
        self._loop.add_reader(self._fd, self.drain)
        self._watchdog = self._loop.call_later(_WATCHDOG_S, self._watch)
        self._look_soon()

    def send(self, frame: bytes) -> None:
        """Queue one frame. Raises zmq.Again where the queue is full or nobody is connected; never blocks."""
        self._socket.send(frame, zmq.NOBLOCK)
        self._look_soon()

    def send_to(self, peer: bytes, frame: bytes) -> None:
        """Queue one frame for a ROUTER's peer. Raises zmq.Again (its queue is full) or zmq.ZMQError (it is gone)."""
        self._socket.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
        self._socket.send(frame, zmq.NOBLOCK)
        self._look_soon()

    def drain(self) -> None:
        """Deliver what is there. Leaves the rest for a later turn of the loop after a batch."""
        if self._closed or self._draining:
            return
        self._draining = True
        try:
            for _ in range(_BATCH):
                if not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                    return
                frames = self._receive()
                if frames:
                    self._on_frames(frames)
                if self._closed:
                    return
        finally:
            self._draining = False
        self._look_soon()

    def close(self) -> None:
        """Stop delivering. The socket itself is its owner's to close, afterwards."""
        if not self._closed:
            self._closed = True
            self._watchdog.cancel()
            self._loop.remove_reader(self._fd)

    def _receive(self) -> list[bytes]:
        """One message; no frames where it is not to be heard."""
        socket, allowed = self._socket, True
        if self._allows is None:
            frames = [socket.recv(zmq.NOBLOCK)]
        else:
            # a frame that is not copied knows whose it is
            first = socket.recv(zmq.NOBLOCK, copy=False)
            allowed = self._allows(str(first.get("User-Id")))
            frames = [first.bytes]
        while socket.get(zmq.RCVMORE):
            frame = socket.recv(zmq.NOBLOCK)
            if len(frames) < _MAX_FRAMES:
                frames.append(frame)
        return frames if allowed else []

    def _look_soon(self) -> None:
        # several sends in one turn of the loop share one look; a drain in progress looks anyway
        if not self._look_due and not self._draining:
            self._look_due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._look_due = False
        self.drain()

    def _watch(self) -> None:
        self._watchdog = self._loop.call_later(_WATCHDOG_S, self._watch)
        self.drain()
