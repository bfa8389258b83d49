"""Revisions on their way from a trainer to nodes: offered on the trainer's feed, pulled from it chunk by chunk.

A **transfer** is one revision file while it is being written, known by an id of its own. What its digest will be is
known once the file is whole: ``Bound`` says so on the feed, and the answer with the last chunk does. Until then the id
stands for the revision, and afterwards nothing but the digest does.
"""

from __future__ import annotations

import msgspec

from .outcomes import Outcome

MAX_CHUNK_BYTES = 4 << 20
"""Bound of what one ``Pull`` may ask for."""

CHUNK_CREDITS = 8
"""How many chunks of one transfer a node may have asked for and not got: its credits."""


class TransferMessage(msgspec.Struct, frozen=True, tag=True, tag_field="t", omit_defaults=True, kw_only=True):
    """Base of all messages between a trainer and sidecars."""


class Offered(TransferMessage, frozen=True, kw_only=True):
    """A revision of ``policy`` (``tenant/name``) over ``base`` is being written, and will have ``size`` bytes.

    ``nodes`` are those that would be asked for a policy which no node holds.
    """

    transfer: str
    policy: str
    base: str
    rank: int
    size: int
    nodes: tuple[str, ...] = ()


class Bound(TransferMessage, frozen=True, kw_only=True):
    """The transfer's file is whole, and this is its digest. No event names it yet."""

    transfer: str
    digest: str


class Withdrawn(TransferMessage, frozen=True, kw_only=True):
    """There will be no such revision: what was pulled of it is worth nothing."""

    transfer: str


class Pull(TransferMessage, frozen=True, kw_only=True):
    """Ask for ``length`` bytes at ``offset``, answered with Chunk once they are written, or with Unavailable.

    The last bytes of a file are not given before its digest is known. A node on the trainer's own host is ``local``:
    it can read the trainer's files, and may be told where the bytes lie in place of them.
    """

    transfer: str
    node: str
    offset: int
    length: int
    local: bool = False


class Pulled(TransferMessage, frozen=True, kw_only=True):
    """One-way: the node has all of the transfer, verified; or (``ok`` is false) it asks for no more of it."""

    transfer: str
    node: str
    ok: bool


class Chunk(TransferMessage, frozen=True, kw_only=True):
    """The bytes that were asked for, or the file on this host that they are to be read from, at their offset.

    ``digest`` is that of the whole file, with the last of them.
    """

    data: bytes = b""
    path: str = ""
    digest: str = ""


class Unavailable(TransferMessage, frozen=True, kw_only=True):
    """No such bytes: the transfer is unknown, was withdrawn, or the ask was out of bounds."""

    outcome: Outcome
    message: str
    field: str | None = None


OfferOfTrainer = Offered | Bound | Withdrawn
AskOfTransfer = Pull | Pulled
AnswerOfTransfer = Chunk | Unavailable
