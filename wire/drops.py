"""Why a message was not delivered, and how often: what a peer does wrong is counted, never fatal."""

from __future__ import annotations

import enum
import logging
from collections import Counter

_log = logging.getLogger(__name__)


class Drop(enum.StrEnum):
    """Reasons; few and fixed, so that they may be metric labels."""

    BAD_FRAME = "bad_frame"
    """Not the frames or the header of our wire (or another version of it)."""
    OVERSIZED = "oversized"
    UNDECODABLE = "undecodable"
    """Not MessagePack, or cut short."""
    UNKNOWN = "unknown_message"
    """A message of a type that this socket does not take."""
    INVALID = "invalid_fields"
    """A known type whose fields are missing or of the wrong type."""
    EXPIRED = "expired"
    """The deadline had passed before the message was handled or answered."""
    LATE_ANSWER = "late_answer"
    """An answer whose asker had stopped waiting."""
    QUEUE_FULL = "queue_full"
    PEER_GONE = "peer_gone"
    HANDLER_FAILED = "handler_failed"
    """Our own code raised while it handled the message."""
    STALE_NUMBER = "stale_number"
    """A feed's message that had been seen already."""
    PEER_REFUSED = "peer_refused"
    """A peer without an allowed key, or whose handshake failed."""


class Drops(Counter[Drop]):
    """Drops of one socket by reason. ``name`` says in the log whose they are."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self._name = name

    def note(self, reason: Drop, detail: object = "") -> None:
        """Count one; log the 1st, 2nd, 4th, 8th..., so that a peer gone wild does not fill the disk."""
        count = self[reason] + 1
        self[reason] = count
        if count & (count - 1) == 0:
            _log.warning("%s: dropped for %s (%d so far): %s", self._name, reason, count, detail)
