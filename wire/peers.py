"""Bytes between the sidecars of a fleet: an artifact that one has, taken by another chunk by chunk, by its digest."""

from __future__ import annotations

import enum

import msgspec

from .transfer import CHUNK_CREDITS as CHUNK_CREDITS

MAX_CHUNK_BYTES = 1 << 20
"""Bound of what one ``Take`` may ask for."""

MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + 4096
"""The largest message is a chunk and little beside it."""


class Peer(msgspec.Struct, frozen=True):
    """Another node that may have some bytes: its name, where it gives them, and its CURVE key, if any."""

    node: str
    endpoint: str
    public: str = ""


class WhyNot(enum.StrEnum):
    """Why a node gives nothing. None of it is a fault."""

    ABSENT = "absent"
    BUSY = "busy"
    INVALID = "invalid"


class PeerMessage(msgspec.Struct, frozen=True, tag=True, tag_field="t", omit_defaults=True, kw_only=True):
    """Base of all messages between sidecars."""


class Take(PeerMessage, frozen=True, kw_only=True):
    """``node`` asks for ``length`` bytes of ``digest`` at ``offset``: answered with Given or NotGiven.

    The first of a digest begins a transfer. It waits, within its deadline, where the bytes are on their way, or where
    as many transfers run as may.
    """

    digest: str
    node: str
    offset: int
    length: int


class Taken(PeerMessage, frozen=True, kw_only=True):
    """One-way: no more of ``digest`` will be asked for on this connection."""

    digest: str


class Given(PeerMessage, frozen=True, kw_only=True):
    """The bytes that were asked for, of an artifact of ``size`` bytes. Whoever takes them computes their digest."""

    data: bytes
    size: int


class NotGiven(PeerMessage, frozen=True, kw_only=True):
    """No bytes; ``field`` names what was wrong with the ask, where something was.

    ``peers`` are those of whom this node is getting the bytes itself: whoever asks it may ask them.
    """

    why: WhyNot
    message: str
    field: str | None = None
    peers: tuple[Peer, ...] = ()


AskOfPeer = Take | Taken
AnswerOfPeer = Given | NotGiven
