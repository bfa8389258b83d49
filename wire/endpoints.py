"""Sockets at their endpoints: options that all of ours share, private ``ipc://`` files, one server an endpoint."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import zmq

from .codec import MAX_MESSAGE_BYTES
from .curve import Authenticator, CurveKeys, secure_client, secure_server
from .drops import Drops
from .frames import LONGEST_HEADER
from .outcomes import InvalidRequest, NoHealthyNode

HEARTBEAT_S = 1.0
"""How often each side of an idle connection asks whether the other still lives."""
HEARTBEAT_TIMEOUT_S = 5.0
"""A peer silent for this long is gone (a killed process on the same host is noticed at once)."""

MAX_SOCKETS = 65_000
"""That connect, of one process; ZeroMQ's own default is 1,023. A link takes three, with an open file each."""

Socket = zmq.Socket[bytes]


def shared_context() -> zmq.Context[Socket]:
    """The context of all sockets that connect."""
    context: zmq.Context[Socket] = zmq.Context.instance()
    if context.get(zmq.MAX_SOCKETS) < MAX_SOCKETS:
        # in force only if it is set before the context's first socket
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def no_more_sockets(error: zmq.ZMQError) -> NoHealthyNode:
    """Why libzmq made no socket, or none to watch another with: the one limit that is ours is on open files."""
    return NoHealthyNode(f"cannot make another socket: {error}; `ulimit -n` bounds how many files may be open")


def connecting_socket(
    kind: int, *, hwm: int, max_bytes: int = MAX_MESSAGE_BYTES, curve: CurveKeys | None = None, server_public: str = ""
) -> Socket:
    """A socket that is ready to connect. Raises InvalidRequest for keys that are none, NoHealthyNode where this process
    can have no more sockets.
    """
    try:
        socket: Socket = shared_context().socket(kind)
    except zmq.ZMQError as error:
        raise no_more_sockets(error) from None
    try:
        _limit(socket, hwm, max_bytes)
        socket.reconnect_ivl = 50
        socket.reconnect_ivl_max = 1000
        if curve is not None:
            secure_client(socket, curve, server_public)
    except InvalidRequest:
        socket.close()
        raise
    return socket


class BoundSocket:
    """A socket bound to an endpoint, with all that this takes.

    It lives in a ZeroMQ context of its own: who may connect is decided by context, and ending the context waits until
    the endpoint is free again, so that a successor finds neither the port taken nor its socket file unlinked.
    Raises InvalidRequest for an endpoint that is in use, too long or not ZeroMQ's, and for keys that are none.
    """

    def __init__(
        self,
        kind: int,
        endpoint: str,
        *,
        hwm: int,
        drops: Drops,
        max_bytes: int = MAX_MESSAGE_BYTES,
        curve: CurveKeys | None = None,
    ) -> None:
        self._claim: int | None = None
        self._authenticator: Authenticator | None = None
        self._context: zmq.Context[Socket] = zmq.Context()
        self.socket: Socket = self._context.socket(kind)
        try:
            _limit(self.socket, hwm, max_bytes)
            if kind == zmq.ROUTER:
                # an answer for a peer that is gone or does not read is an error that we count, not silence
                self.socket.router_mandatory = True
            if curve is not None:
                self._authenticator = Authenticator(self._context, curve.peers, drops)
                secure_server(self.socket, curve)
            self._bind(endpoint)
        except BaseException:
            self.close()
            raise
        self.endpoint = bytes(self.socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def allow(self, keys: Iterable[str]) -> None:
        """Let exactly these CURVE keys connect, and be heard, from now on; without CURVE everybody may. Raises
        InvalidRequest."""
        if self._authenticator is not None:
            self._authenticator.allow(keys)

    @property
    def allows(self) -> Callable[[str], bool] | None:
        """Whether a CURVE key is heard; None without CURVE."""
        return None if self._authenticator is None else self._authenticator.allows

    def close(self) -> None:
        self.socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.close()
            self._authenticator = None
        self._context.term()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def _bind(self, endpoint: str) -> None:
        try:
            if endpoint.startswith("ipc://"):
                self._bind_file(Path(endpoint.removeprefix("ipc://")))
            else:
                self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise InvalidRequest(f"cannot serve at {endpoint}: {error}", field="endpoint") from None

    def _bind_file(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._claim = _claim(path)
        # the file must never have been open to others, not even between bind and chmod
        before = os.umask(0o177)
        try:
            self.socket.bind(f"ipc://{path}")
        finally:
            os.umask(before)


def _claim(path: Path) -> int:
    """A lock beside the socket file, freed by the kernel however its holder ends.

    Without it a second server would silently take the first one's file: libzmq unlinks whatever lies there.
    """
    lock = path.with_name(path.name + ".lock")
    claim = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(claim)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise InvalidRequest(f"another process serves at ipc://{path}", field="endpoint") from None
    return claim


def _limit(socket: Socket, hwm: int, max_bytes: int) -> None:
    socket.linger = 0
    socket.sndhwm = hwm
    socket.rcvhwm = hwm
    socket.maxmsgsize = max_bytes + LONGEST_HEADER
    socket.heartbeat_ivl = int(HEARTBEAT_S * 1000)
    socket.heartbeat_timeout = int(HEARTBEAT_TIMEOUT_S * 1000)
    socket.handshake_ivl = 5000
