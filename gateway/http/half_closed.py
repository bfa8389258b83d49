"""Tells a client that has only finished sending from one that has left.

Both look alike at first: the stream ends. A client that left answers the next bytes it gets with a reset, so it is sent
one interim response, which any HTTP/1.1 client skips, and the socket's state is looked at from then on. Without this,
the engine would go on generating for nobody until the whole answer is there.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from gateway.http.answers import CONTINUE

_FIRST_LOOK_S = 0.02
_LONGEST_PAUSE_S = 1.0
_TCP_CLOSE = 7  # the first byte of struct tcp_info, in linux/tcp_states.h


class HalfClosedWatch:
    """Looks again and again, ever more seldom, until ``stop`` or until ``left`` has been called.

    ``may_probe`` says whether an interim response may be sent now: the first time that it may, one is.
    """

    def __init__(self, transport: asyncio.Transport, may_probe: Callable[[], bool], left: Callable[[], None]) -> None:
        self._transport = transport
        self._may_probe = may_probe
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._delay = _FIRST_LOOK_S
        self._probed = False
        self._probe()

    def stop(self) -> None:
        self._timer.cancel()

    def _probe(self) -> None:
        if not self._probed and self._may_probe():
            self._probed = True
            self._transport.write(CONTINUE)
        self._timer = self._loop.call_later(self._delay, self._look)
        self._delay = min(2 * self._delay, _LONGEST_PAUSE_S)

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        sock = self._transport.get_extra_info("socket")
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self._left()
        else:
            self._probe()
