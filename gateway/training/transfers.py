"""Revisions offered to nodes while they are written: the trainer's end of ``wire.transfer``.

A node asks for chunks ahead of what is written, and is answered as the file grows; the last chunk waits for the
digest. What is not asked for in time is in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from catalog.settings import CurveSettings
from wire.outcomes import ArtifactUnavailable, InvalidRequest, NotFound, RoostError
from wire.sockets import FeedPublisher, Reply, Responder
from wire.transfer import (
    CHUNK_CREDITS,
    MAX_CHUNK_BYTES,
    AnswerOfTransfer,
    AskOfTransfer,
    Bound,
    Chunk,
    Offered,
    OfferOfTrainer,
    Pull,
    Unavailable,
    Withdrawn,
)

from .settings import TransferAddress

_log = logging.getLogger(__name__)

# how long after its end a transfer can still be pulled by a node that was slow
_LINGER_S = 30.0
_MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + 4096
# chunks of one transfer that all nodes together wait for
_MAX_WAITING = 4096

_Reply = Reply[AnswerOfTransfer]


class _Asked(NamedTuple):
    """``local``: the asker can read our files."""

    pull: Pull
    reply: _Reply
    local: bool


class _Door(NamedTuple):
    """Where some nodes are told of revisions, and get them."""

    feed: FeedPublisher[OfferOfTrainer]
    chunks: Responder[AskOfTransfer, AnswerOfTransfer]

    def close(self) -> None:
        self.chunks.close()
        self.feed.close()


class Transfer:
    """One revision file that is being written at ``path``. Its methods tell what has become of it."""

    def __init__(
        self, name: str, path: Path, tell: Callable[[OfferOfTrainer], None], offer: Callable[[int], Offered]
    ) -> None:
        self.name = name
        self._path = path
        self._tell = tell
        self._offer = offer
        self._file: int | None = None
        self._size = 0
        self._done = 0
        self._digest = ""
        self._withdrawn = False
        self._waiting: list[_Asked] = []
        self._pulling: set[str] = set()
        self._through = asyncio.Event()

    @property
    def pulling(self) -> frozenset[str]:
        """The nodes that have asked for chunks and are not through."""
        return frozenset(self._pulling)

    def progress(self, done: int, total: int) -> None:
        """The file's first ``done`` bytes of ``total`` are final. Begun anew, it has other bytes or the same.

        Nothing happens once it was withdrawn.
        """
        if self._withdrawn:
            return
        if self._file is None or done < self._done:
            first = self._file is None
            self._open()
            self._size = total
            if first:
                self._tell(self._offer(total))
        self._done = done
        self._serve()

    def bind(self, digest: str) -> None:
        """The file is whole."""
        if self._file is not None:
            self._done, self._digest = self._size, digest
            self._tell(Bound(transfer=self.name, digest=digest))
            self._serve()

    async def pulled(self, timeout_s: float) -> None:
        """Wait, but not longer, for the nodes that have begun to pull."""
        if self._pulling:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._through.wait()

    def withdraw(self) -> None:
        """There will be no revision."""
        offered, self._withdrawn = self._file is not None and not self._withdrawn, True
        if offered:
            self._tell(Withdrawn(transfer=self.name))
            self._serve()

    def close(self) -> None:
        """What waits for bytes gets none."""
        self._withdrawn = True
        self._serve()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def ask(self, pull: Pull, reply: _Reply, *, local: bool) -> None:
        """Answer now or once the bytes are written. Raises InvalidRequest for what is out of bounds."""
        if not 0 < pull.length <= MAX_CHUNK_BYTES:
            raise InvalidRequest(f"length is {pull.length}: expected 1 to {MAX_CHUNK_BYTES}", field="length")
        if not 0 <= pull.offset <= self._size - pull.length:
            raise InvalidRequest(f"the {self._size} bytes have no {pull.length} at {pull.offset}", field="offset")
        if sum(asked.pull.node == pull.node for asked in self._waiting) >= CHUNK_CREDITS:
            raise InvalidRequest(f"{CHUNK_CREDITS} chunks are being waited for already", field="node")
        if len(self._waiting) >= _MAX_WAITING:
            raise InvalidRequest(f"{_MAX_WAITING} chunks are being waited for by all nodes", field="transfer")
        if not self._digest:
            self._pulling.add(pull.node)
            self._through.clear()
        self._waiting.append(_Asked(pull, reply, local))
        self._serve()

    def end(self, node: str) -> None:
        """A node has all of it, or wants no more."""
        self._pulling.discard(node)
        self._waiting = [asked for asked in self._waiting if asked.pull.node != node]
        if not self._pulling:
            self._through.set()

    def _open(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def _serve(self) -> None:
        """Answer whoever can be answered."""
        waiting, self._waiting = self._waiting, []
        for asked in waiting:
            if asked.reply.expired:
                continue
            answer = self._answer(asked.pull, local=asked.local)
            if answer is None:
                self._waiting.append(asked)
            else:
                asked.reply(answer)

    def _answer(self, pull: Pull, *, local: bool) -> AnswerOfTransfer | None:
        end = pull.offset + pull.length
        if self._withdrawn or self._file is None:
            return _refusal(ArtifactUnavailable("the revision was withdrawn"))
        if end > self._done or (end == self._size and not self._digest):
            return None
        digest = self._digest if end == self._size else ""
        if pull.local and local:
            return Chunk(path=str(self._path), digest=digest)
        return Chunk(data=os.pread(self._file, pull.length, pull.offset), digest=digest)


class Transfers:
    """Offers and chunks at each of ``addresses``. Raises InvalidRequest where it can't serve there.

    ``nodes`` says which node would be asked first for a policy that none holds.
    """

    def __init__(
        self,
        addresses: Sequence[TransferAddress],
        *,
        nodes: Callable[[str], Sequence[str]],
        curve: CurveSettings | None = None,
    ) -> None:
        self._nodes = nodes
        self._transfers: dict[str, Transfer] = {}
        self._loop = asyncio.get_running_loop()
        self._doors: list[_Door] = []
        try:
            for address in addresses:
                self._doors.append(self._open(address, curve))
        except RoostError:
            self.close()
            raise

    @property
    def addresses(self) -> list[TransferAddress]:
        """Where it serves, with the ports that a ``tcp://...:*`` got."""
        return [TransferAddress(door.chunks.endpoint, door.feed.endpoint) for door in self._doors]

    def begin(self, path: Path, *, policy: str, base: str, rank: int) -> Transfer:
        """A transfer of the file that will be at ``path``. It is offered at its first progress; ``end`` it."""
        name = secrets.token_hex(16)

        def offer(size: int) -> Offered:
            nodes = tuple(self._nodes(policy))
            return Offered(transfer=name, policy=policy, base=base, rank=rank, size=size, nodes=nodes)

        transfer = self._transfers[name] = Transfer(name, path, self._tell, offer)
        return transfer

    def end(self, transfer: Transfer) -> None:
        """It is published, or withdrawn. Nodes that pull go on for a while."""
        self._loop.call_later(_LINGER_S, self._drop, transfer)

    def close(self) -> None:
        for transfer in list(self._transfers.values()):
            self._drop(transfer)
        for door in self._doors:
            door.close()

    def _open(self, address: TransferAddress, curve: CurveSettings | None) -> _Door:
        feed: FeedPublisher[OfferOfTrainer] = FeedPublisher(
            address.feed_endpoint, OfferOfTrainer, epoch=time.time_ns(), curve=curve
        )
        take = partial(self._on_ask, local=address.endpoint.startswith("ipc://"))
        try:
            chunks: Responder[AskOfTransfer, AnswerOfTransfer] = Responder(
                address.endpoint, AskOfTransfer, AnswerOfTransfer, take, curve=curve, max_bytes=_MAX_MESSAGE_BYTES
            )
        except RoostError:
            feed.close()
            raise
        return _Door(feed, chunks)

    def _tell(self, message: OfferOfTrainer) -> None:
        for door in self._doors:
            door.feed.publish(message)

    def _drop(self, transfer: Transfer) -> None:
        if self._transfers.pop(transfer.name, None) is not None:
            transfer.close()

    def _on_ask(self, ask: AskOfTransfer, reply: _Reply, *, local: bool) -> None:
        transfer = self._transfers.get(ask.transfer)
        if not isinstance(ask, Pull):
            if transfer is not None:
                transfer.end(ask.node)
            return
        try:
            if transfer is None:
                raise NotFound("there is no such transfer", field="transfer")
            transfer.ask(ask, reply, local=local)
        except RoostError as error:
            reply(_refusal(error))


def _refusal(error: RoostError) -> Unavailable:
    return Unavailable(outcome=error.outcome, message=error.message, field=error.field)
