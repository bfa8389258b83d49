"""CURVE: key pairs, what they are applied to, and who may connect."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgspec
import zmq
from zmq.utils import z85

from .drops import Drop, Drops
from .outcomes import InvalidRequest
from .reactor import Reactor

# fixed by ZeroMQ (RFC 27)
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_DOMAIN = b"roost"


class CurveKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CURVE keys (Z85) of this process. ``peers`` are the public keys that may connect to its sockets."""

    public: str
    secret: str
    server_public: str = ""
    peers: tuple[str, ...] = ()


def make_keys() -> tuple[str, str]:
    """A new key pair: (public, secret), 40 characters of Z85 each."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def decode_key(text: str, field: str) -> bytes:
    """The 32 bytes of a Z85 key. Raises InvalidRequest that names ``field`` and never shows the key."""
    try:
        key = z85.decode(text.encode()) if len(text) == 40 else b""
    except (KeyError, ValueError, struct.error):
        key = b""
    if len(key) != 32:
        raise InvalidRequest(f"{field} is not a CURVE key: expected 40 characters of Z85", field=field)
    return key


def secure_client(socket: zmq.Socket[bytes], keys: CurveKeys, server_public: str = "") -> None:
    """Make a connecting socket prove who we are, and accept only a peer that holds the server's secret."""
    socket.curve_publickey = decode_key(keys.public, "curve.public")
    socket.curve_secretkey = decode_key(keys.secret, "curve.secret")
    socket.curve_serverkey = decode_key(server_public or keys.server_public, "curve.server_public")


def secure_server(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Make a binding socket demand CURVE. Who may connect is the Authenticator's to say, in the same context."""
    socket.curve_secretkey = decode_key(keys.secret, "curve.secret")
    socket.curve_publickey = decode_key(keys.public, "curve.public")
    socket.curve_server = True
    socket.zap_domain = _DOMAIN


class Authenticator:
    """Answers ZeroMQ's questions about who may connect (ZAP), on the event loop, for one context.

    Must stand before a socket of that context binds: without it libzmq would let any key in.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Iterable[str], drops: Drops) -> None:
        self._drops = drops
        self.allow(allowed)
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ENDPOINT)
        self._reactor = Reactor(self._socket, self._on_question)

    def allow(self, keys: Iterable[str]) -> None:
        """Let exactly ``keys`` connect from now on. Raises InvalidRequest."""
        keys = frozenset(keys)
        for key in keys:
            decode_key(key, "curve.peers")
        self._allowed = keys

    def allows(self, key: str) -> bool:
        """Whether who connected with ``key`` may still be heard: libzmq never asks about a connection again."""
        if key in self._allowed:
            return True
        self._drops.note(Drop.PEER_REFUSED, "its key is not allowed any more")
        return False

    def close(self) -> None:
        self._reactor.close()
        self._socket.close()

    def _on_question(self, frames: list[bytes]) -> None:
        _, request, domain, *_ = frames
        key = z85.encode(frames[6]) if domain == _DOMAIN and frames[5] == b"CURVE" else b""
        allowed = key.decode() in self._allowed
        if not allowed:
            self._drops.note(Drop.PEER_REFUSED, f"{frames[3].decode('ascii', 'replace')} has no allowed key")
        status = (b"200", b"OK") if allowed else (b"400", b"not an allowed key")
        # the key goes along with each message of the connection, as its user id
        self._socket.send_multipart([_ZAP_VERSION, request, *status, key, b""], zmq.NOBLOCK)
