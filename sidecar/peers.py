"""The asker's edge: bytes taken from other nodes, as sources of a fetch.

A fetch runs on a thread and the sockets live on the loop: the thread asks the loop for chunks, several ahead, and
writes them where they belong. Whatever a node does, within bounds of seconds the next one is asked, or the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any

from blake3 import blake3
from msgspec import structs

from catalog.artifacts import ArtifactSource
from catalog.names import shown
from wire.curve import CurveKeys
from wire.outcomes import ArtifactUnavailable, RoostError
from wire.peers import (
    CHUNK_CREDITS,
    MAX_CHUNK_BYTES,
    MAX_MESSAGE_BYTES,
    AnswerOfPeer,
    AskOfPeer,
    Given,
    NotGiven,
    Peer,
    Take,
    Taken,
)
from wire.sockets import Requester, Sockets

from .effects import StartFetch
from .events import AnyEvent, PeerFailed
from .extents import Extent
from .neighbours import MAX_PEERS
from .settings import SidecarSettings

_log = logging.getLogger(__name__)

# for a node to be reached; to give the first chunk, which it may be getting itself just now; and each one after that
_CONNECT_S, _FIRST_S, _CHUNK_S = 1.0, 2.0, 2.0
# a transfer that is slower than this is given up, and so is one that takes this share of a load's time
_SLOWEST_BYTES_S = 8 << 20
_SHARE = 0.25
# nodes asked for one fetch, those included that were named by others; and of how many that gave nothing in time
_MAX_ASKED, _MAX_FAILED = 6, 2
# connections that nobody used for so long are closed
_IDLE_S = 30.0

_Wire = Requester[AskOfPeer, AnswerOfPeer]


class Peers:
    """Connections to other nodes, made when they are needed. ``emit`` gets events, on the loop's thread.

    ``may_follow`` says whether a node is to be asked that another one names.
    """

    def __init__(
        self,
        settings: SidecarSettings,
        emit: Callable[[AnyEvent], None],
        may_follow: Callable[[Peer], bool],
        *,
        sockets: Sockets,
    ) -> None:
        self.node = settings.node
        self.longest_s = settings.load_timeout_s * _SHARE
        self.loop = asyncio.get_running_loop()
        self._curve: CurveKeys | None = settings.curve
        self._emit = emit
        self._may_follow = may_follow
        self._sockets = sockets
        self._wires: dict[Peer, _Wire] = {}
        self._idle: dict[Peer, asyncio.TimerHandle] = {}
        self._closed = False

    def sources(self, effect: StartFetch) -> Route:
        """What a fetch may ask, in order. Over CURVE or without, as the fleet is: never one for the other."""
        curve = self._curve is not None
        return Route(self, [peer for peer in effect.peers if bool(peer.public) is curve], effect.extent.length)

    async def take(self, peer: Peer, digest: str, offset: int, length: int, timeout_s: float) -> Given | NotGiven:
        """On the loop. Raises ArtifactUnavailable where the node is not there, DeadlinePassed."""
        ask = Take(digest=digest, node=self.node, offset=offset, length=length)
        answer = await self._wire(peer).request(ask, timeout_s=timeout_s)
        if isinstance(answer, NotGiven):
            # another node's words: bounded here, before they are logged or kept
            peers = tuple(filter(self._may_follow, answer.peers[:MAX_PEERS]))
            answer = structs.replace(answer, message=shown(answer.message), peers=peers)
        return answer

    def taken(self, peer: Peer, digest: str) -> None:
        """On any thread: the transfer is over."""
        self._on_loop(self._taken, peer, digest)

    def failed(self, event: PeerFailed) -> None:
        """On any thread."""
        self._on_loop(self._emit, event)

    def close(self) -> None:
        """Fail what is under way."""
        self._closed = True
        for timer in self._idle.values():
            timer.cancel()
        for wire in self._wires.values():
            wire.close()

    def _on_loop(self, work: Callable[..., Any], *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(work, *arguments)

    def _wire(self, peer: Peer) -> _Wire:
        if self._closed:
            raise ArtifactUnavailable("this node is stopping")
        wire = self._wires.get(peer)
        if wire is None:
            wire = self._wires[peer] = self._sockets.requester(
                peer.endpoint,
                AskOfPeer,
                AnswerOfPeer,
                peer=f"node {peer.node}",
                gone=ArtifactUnavailable,
                patience_s=_CONNECT_S,
                max_bytes=MAX_MESSAGE_BYTES,
                curve=self._curve,
                server_public=peer.public,
            )
        if peer in self._idle:
            self._idle[peer].cancel()
        self._idle[peer] = self.loop.call_later(_IDLE_S, self._drop, peer)
        return wire

    def _taken(self, peer: Peer, digest: str) -> None:
        if peer in self._wires and not self._closed:
            self._wires[peer].send(Taken(digest=digest))

    def _drop(self, peer: Peer) -> None:
        del self._idle[peer]
        self._wires.pop(peer).close()


class Route:
    """The nodes that one fetch asks, one after the other: those it was told of, then those that they name."""

    def __init__(self, peers: Peers, told: Sequence[Peer], size: int) -> None:
        self.size = size
        self.failed = 0
        self._peers = peers
        self._next = deque(told)
        self._known = {peers.node, *(peer.node for peer in told)}

    def __iter__(self) -> Iterator[PeerSource]:
        for _ in range(_MAX_ASKED):
            if not self._next or self.failed >= _MAX_FAILED:
                return
            yield PeerSource(self._peers, self._next.popleft(), self)

    def named(self, peers: Sequence[Peer]) -> None:
        for peer in peers:
            if peer.node not in self._known:
                self._known.add(peer.node)
                self._next.append(peer)


class PeerSource:
    """One node, as a ``Source`` of one fetch, whose ``route`` it lengthens."""

    name = "peer"

    def __init__(self, peers: Peers, peer: Peer, route: Route) -> None:
        self._peers = peers
        self._peer = peer
        self._route = route

    @property
    def node(self) -> str:
        return self._peer.node

    @contextlib.contextmanager
    def open(self, digest: str) -> Iterator[ArtifactSource | None]:
        taking = _Taking(self._peers, self._peer, digest, self._route)
        try:
            yield taking if taking.begin() else None
        finally:
            taking.end()

    def distrust(self, digest: str) -> None:
        """Who gave what was told where it was found."""

    def arrived(self, digest: str, extent: Extent) -> None:
        """It keeps no copies of ours."""

    def close(self) -> None:
        """Its connection is not its own."""


class _Taking:
    """One artifact from one node. Used on a fetch's thread."""

    def __init__(self, peers: Peers, peer: Peer, digest: str, route: Route) -> None:
        self.size = size = route.size
        self._route = route
        self._peers = peers
        self._peer = peer
        self._digest = digest
        self._starts = iter(range(0, size, MAX_CHUNK_BYTES))
        self._ahead: deque[Future[Given | NotGiven]] = deque()
        self._first: Given | None = None
        self._until = peers.loop.time() + min(peers.longest_s, _FIRST_S + size / _SLOWEST_BYTES_S)

    def begin(self) -> bool:
        """Ask for the first chunk: whether there will be others."""
        self._ask(islice(self._starts, 1), _FIRST_S)
        try:
            answer = self._next()
        except RoostError as error:
            self._failed(error.message, wrong=False)
            return False
        if isinstance(answer, NotGiven):
            _log.info("node %s does not give %s (%s): %s", self._peer.node, self._digest, answer.why, answer.message)
            self._route.named(answer.peers)
            return False
        if answer.size != self.size:
            self._failed(f"artifact {self._digest} has {self.size} bytes, not {answer.size}", wrong=True)
            return False
        self._first = answer
        return True

    def fill(self, view: memoryview, given_up: Callable[[], bool]) -> str | None:
        """As ``ArtifactSource``. Raises ArtifactUnavailable where the node stops giving, or is slow."""
        hasher = blake3()
        self._ask(islice(self._starts, CHUNK_CREDITS), _CHUNK_S)
        for start in range(0, self.size, MAX_CHUNK_BYTES):
            if given_up():
                return None
            with view[start : start + MAX_CHUNK_BYTES] as place:
                place[:] = self._chunk(start, len(place))
                hasher.update(place)
        found = hasher.hexdigest()
        if found != self._digest:
            self._failed(f"what it has as artifact {self._digest} has digest {found}", wrong=True)
        return found

    def end(self) -> None:
        """Nothing more is asked for, and nobody waits for what was."""
        for asked in self._ahead:
            asked.cancel()
        self._peers.taken(self._peer, self._digest)

    def _chunk(self, start: int, length: int) -> bytes:
        try:
            if self._peers.loop.time() > self._until:
                raise ArtifactUnavailable(f"it has given {start} of {self.size} bytes, too slowly")
            answer = self._first if start == 0 and self._first is not None else self._next()
            if isinstance(answer, NotGiven):
                raise ArtifactUnavailable(f"it gives no more: {answer.message}")
            if len(answer.data) != length:
                raise ArtifactUnavailable(f"a chunk has {len(answer.data)} bytes, not {length}")
        except RoostError as error:
            self._failed(error.message, wrong=False)
            raise ArtifactUnavailable(f"node {self._peer.node}: {error.message}") from error
        if start:
            self._ask(islice(self._starts, 1), _CHUNK_S)
        return answer.data

    def _ask(self, starts: Iterator[int], timeout_s: float) -> None:
        for start in starts:
            length = min(MAX_CHUNK_BYTES, self.size - start)
            work = self._peers.take(self._peer, self._digest, start, length, timeout_s)
            self._ahead.append(asyncio.run_coroutine_threadsafe(work, self._peers.loop))

    def _next(self) -> Given | NotGiven:
        return self._ahead.popleft().result()

    def _failed(self, message: str, *, wrong: bool) -> None:
        self._route.failed += 1
        self._peers.failed(PeerFailed(node=self._peer.node, wrong=wrong, message=message))
