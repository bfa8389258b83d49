"""The headers in front of a message on the wire. Pure bytes: no sockets, no clocks.

An ask, an answer and a feed's message are one frame each: a fixed header, then the encoded message. A frame and not
several, because each frame costs a call on both sides.
"""

from __future__ import annotations

import enum
import math
import struct

from .codec import MalformedMessage
from .drops import Drop

VERSION = 1

_ASK = struct.Struct(">BQd")
_ANSWER = struct.Struct(">BQB")
_FEED = struct.Struct(">BQQB")
LONGEST_HEADER = max(_ASK.size, _ANSWER.size, _FEED.size)

ONE_WAY = 0
"""The number of an ask that wants no answer."""
LONGEST_DEADLINE_S = 7 * 86_400.0


class Verdict(enum.IntEnum):
    """What an answer frame is: an answer, or the peer's word that there will be none."""

    ANSWER = 0
    NOT_UNDERSTOOD = 1
    FAILED = 2


class Kind(enum.IntEnum):
    """What a feed's frame is."""

    MESSAGE = 0
    HEARTBEAT = 1


_VERDICTS = {int(verdict): verdict for verdict in Verdict}
_KINDS = {int(kind): kind for kind in Kind}


def pack_ask(number: int, remaining_s: float, body: bytes) -> bytes:
    """``remaining_s`` is how long the asker goes on waiting; a duration, because hosts share no clock."""
    return _ASK.pack(VERSION, number, remaining_s) + body


def unpack_ask(frame: bytes) -> tuple[int, float, memoryview]:
    """(number, remaining seconds, body). Raises MalformedMessage."""
    try:
        version, number, remaining_s = _ASK.unpack_from(frame)
    except struct.error:
        raise _bad(f"an ask of {len(frame)} bytes") from None
    if version != VERSION:
        raise _bad(f"an ask of wire version {version}")
    if not 0.0 <= remaining_s < math.inf:
        raise _bad(f"an ask with {remaining_s} s left")
    return number, min(remaining_s, LONGEST_DEADLINE_S), memoryview(frame)[_ASK.size :]


def pack_answer(number: int, verdict: Verdict, body: bytes = b"") -> bytes:
    return _ANSWER.pack(VERSION, number, verdict) + body


def unpack_answer(frame: bytes) -> tuple[int, Verdict, memoryview]:
    """(number of the ask, verdict, body). Raises MalformedMessage."""
    try:
        version, number, code = _ANSWER.unpack_from(frame)
    except struct.error:
        raise _bad(f"an answer of {len(frame)} bytes") from None
    verdict = _VERDICTS.get(code)
    if version != VERSION or verdict is None:
        raise _bad(f"an answer of wire version {version} with verdict {code}")
    return number, verdict, memoryview(frame)[_ANSWER.size :]


def pack_feed(epoch: int, number: int, kind: Kind, body: bytes = b"") -> bytes:
    """``number`` is the message's own, or in a heartbeat that of the newest message."""
    return _FEED.pack(VERSION, epoch, number, kind) + body


def unpack_feed(frame: bytes) -> tuple[int, int, Kind, memoryview]:
    """(epoch, number, kind, body). Raises MalformedMessage."""
    try:
        version, epoch, number, code = _FEED.unpack_from(frame)
    except struct.error:
        raise _bad(f"a feed's frame of {len(frame)} bytes") from None
    kind = _KINDS.get(code)
    if version != VERSION or kind is None:
        raise _bad(f"a feed's frame of wire version {version} and kind {code}")
    return epoch, number, kind, memoryview(frame)[_FEED.size :]


def _bad(detail: str) -> MalformedMessage:
    return MalformedMessage(detail, reason=Drop.BAD_FRAME)
