"""The giver's edge: other nodes take what this one has in its arena, or on disk, chunk by chunk.

A transfer begins with the first chunk that is asked for on a connection, and ends when its asker says so, leaves, or
falls silent. So many run at a time; a few more wait for their turn, or for bytes that are on their way from anywhere
but another node, so that no two nodes ever wait for each other. Past that the answer is "busy", at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from catalog.blobs import is_digest
from catalog.names import shown
from wire.curve import CurveKeys
from wire.node import FleetKeys
from wire.outcomes import InvalidRequest, RoostError
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
)
from wire.peers import WhyNot as Why
from wire.sockets import Reply, Responder, Sockets

from .arena import Arena
from .disk import DiskTier
from .events import AnyEvent, GiveBegun, GiveEnded
from .extents import Extent
from .settings import SidecarSettings
from .state import NodeState

_log = logging.getLogger(__name__)

_THREADS = 2
# asks that wait, of all nodes; and for how long, where their own deadlines are later
_MAX_WAITING, _LONGEST_WAIT_S = 32, 2.0
# an asker that takes nothing for so long has left; and nobody holds the arena's room for longer than this
_IDLE_S, _LONGEST_S = 5.0, 60.0
# an answer must arrive before its asker takes this node for one that is silent
_ANSWER_MARGIN_S = 0.25
# of the name of a node that no gateway tells of
_MAX_NAME = 64
# how long a gateway's word on who is in the fleet holds: far longer than until it gives it again
_KEYS_HOLD_S = 900.0

_Reply = Reply[AnswerOfPeer]
_Key = tuple[bytes, str]


class _Give(msgspec.Struct):
    """One transfer, out of ``extent``; where there is none, out of the copy on disk, ``file``, which is its to close.

    ``at`` is when a chunk was given last; ``reading`` counts those that are being read.
    """

    number: int
    digest: str
    size: int
    began: float
    at: float
    extent: Extent | None = None
    file: int | None = None
    reading: int = 0
    given: int = 0
    ended: bool = False


class Giver:
    """Serves at ``settings.bytes_endpoint``. Raises InvalidRequest where it can't.

    ``apply`` takes events; ``state`` is only read. ``notice`` has to be called whenever it may have changed.
    """

    def __init__(
        self,
        settings: SidecarSettings,
        state: NodeState,
        apply: Callable[[AnyEvent], None],
        *,
        sockets: Sockets,
    ) -> None:
        self._state = state
        self._apply = apply
        self._most = settings.peer_transfers
        self._arena: Arena | None = None
        self._disk: DiskTier | None = None
        self._gives: dict[_Key, _Give] = {}
        # with the time until which each waits
        self._waiting: list[tuple[Take, _Reply, float]] = []
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._settling: asyncio.Handle | None = None
        # by gateway: when it told them, and the keys of nodes by their names
        self._keys: dict[str, tuple[float, dict[str, str]]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="give")
        curve = settings.curve and CurveKeys(settings.curve.public, settings.curve.secret)
        self._curve = curve is not None
        self._responder: Responder[AskOfPeer, AnswerOfPeer] = sockets.responder(
            settings.bytes_endpoint,
            AskOfPeer,
            AnswerOfPeer,
            self._on_ask,
            curve=curve,
            # twice what one asker may have under way: libzmq counts what was sent only after half of it
            hwm=2 * CHUNK_CREDITS * self._most,
            max_bytes=MAX_MESSAGE_BYTES,
        )

    @property
    def endpoint(self) -> str:
        """Where it serves, with the port that a ``tcp://...:*`` got."""
        return self._responder.endpoint

    def open(self, arena: Arena, disk: DiskTier | None) -> None:
        """What it gives from. Before, it has nothing."""
        self._arena, self._disk = arena, disk

    def allow(self, told: FleetKeys) -> None:
        """Let the nodes in that any gateway knows."""
        now = self._loop.time()
        self._keys[told.gateway] = now, told.keys
        self._keys = {name: known for name, known in self._keys.items() if now - known[0] < _KEYS_HOLD_S}
        try:
            self._responder.allow({key for _, keys in self._keys.values() for key in keys.values()})
        except InvalidRequest as error:
            del self._keys[told.gateway]
            _log.warning("the fleet's keys from gateway %s are not taken: %s", told.gateway, error.message)

    def knows(self, peer: Peer) -> bool:
        """Whether a node is of this host, or one that a gateway knows by this name and key."""
        if not self._curve:
            of_this_host = not peer.public and peer.endpoint.startswith("ipc://")
            return of_this_host and len(peer.node) <= _MAX_NAME and peer.node.isprintable()
        return any(keys.get(peer.node) == peer.public for _, keys in self._keys.values())

    def notice(self) -> None:
        """Bytes may have come, or gone, or time passed."""
        if (self._gives or self._waiting) and self._settling is None:
            self._settling = self._loop.call_soon(self._settle)

    def _settle(self) -> None:
        """Begin what waited, now that there is room or that its bytes have come; end what nobody takes any more."""
        self._settling = None
        now = self._loop.time()
        for key, give in list(self._gives.items()):
            if now - give.began > _LONGEST_S or (not give.reading and now - give.at > _IDLE_S):
                self._end(key)
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for ask, reply, until in waiting:
                if now < until:
                    self._begin(ask, reply, until)
                else:
                    reply(NotGiven(why=Why.BUSY, message="its turn, or its bytes, did not come in time"))

    async def close(self) -> None:
        """Give nothing more; nobody reads the arena afterwards."""
        self._responder.close()
        self._waiting.clear()
        if self._settling is not None:
            self._settling.cancel()
        for key in list(self._gives):
            self._end(key)
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._threads.shutdown()

    def _on_ask(self, ask: AskOfPeer, reply: _Reply) -> None:
        if not isinstance(ask, Take):
            self._end((reply.peer, ask.digest))
        elif (wrong := _wrong(ask)) is not None:
            reply(wrong)
        elif (reply.peer, ask.digest) in self._gives:
            self._take(ask, reply)
        else:
            until = min(reply.deadline - _ANSWER_MARGIN_S, self._loop.time() + _LONGEST_WAIT_S)
            self._begin(ask, reply, until)

    def _begin(self, ask: Take, reply: _Reply, until: float) -> None:
        """Begin the transfer of which ``ask`` is the first, let it wait, or refuse it."""
        key = reply.peer, ask.digest
        if key in self._gives:
            self._take(ask, reply)
            return
        resident = self._state.cache.resident(ask.digest)
        on_disk = not resident and self._disk is not None and ask.digest in self._disk
        if not (resident or on_disk or self._comes_in_time(ask.digest, until)):
            coming = self._state.cache.get(ask.digest)
            peers = coming.peers if coming is not None else ()
            reply(NotGiven(why=Why.ABSENT, message="no such bytes are here", peers=peers))
        elif len(self._gives) < self._most and (resident or on_disk):
            give = self._made(ask.digest, resident)
            if give is None:
                reply(NotGiven(why=Why.ABSENT, message="no such bytes are here any more"))
                return
            self._gives[key] = give
            if resident:
                self._apply(GiveBegun(give=give.number, digest=ask.digest))
            _log.info("give %s to node %s", ask.digest, shown(ask.node))
            self._take(ask, reply)
        elif len(self._waiting) < _MAX_WAITING:
            self._waiting.append((ask, reply, until))
        else:
            reply(NotGiven(why=Why.BUSY, message=f"{len(self._gives)} transfers run, and others wait"))

    def _made(self, digest: str, resident: bool) -> _Give | None:
        now = self._loop.time()
        if resident:
            extent = self._state.cache.extent(digest)
            return _Give(next(self._numbers), digest, extent.length, now, now, extent=extent)
        file = self._disk.descriptor(digest) if self._disk is not None else None
        if file is None:
            return None
        return _Give(next(self._numbers), digest, os.fstat(file).st_size, now, now, file=file)

    def _comes_in_time(self, digest: str, until: float) -> bool:
        """Whether bytes are on their way, from anywhere but another node, and likely here by then."""
        entry = self._state.cache.get(digest)
        if entry is None or entry.ready or entry.overdue or entry.peers:
            return False
        expected = entry.since + self._state.queue.times.fetch_s(entry.extent.length)
        return expected < until

    def _take(self, ask: Take, reply: _Reply) -> None:
        give = self._gives[reply.peer, ask.digest]
        if ask.offset + ask.length > give.size:
            message = f"offset: the artifact has {give.size} bytes"
            reply(NotGiven(why=Why.INVALID, message=message, field="offset"))
        elif give.reading >= CHUNK_CREDITS:
            message = f"{CHUNK_CREDITS} chunks are being waited for already"
            reply(NotGiven(why=Why.BUSY, message=message, field="node"))
        else:
            give.reading += 1
            task = self._loop.create_task(self._give(give, ask, reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _give(self, give: _Give, ask: Take, reply: _Reply) -> None:
        answer: AnswerOfPeer
        try:
            data = await self._loop.run_in_executor(self._threads, self._read, give, ask.offset, ask.length)
            answer = Given(data=data, size=give.size)
        except Exception as error:
            # whatever it was, the extent is let go of
            if not isinstance(error, RoostError | OSError):
                _log.exception("the give of %s", give.digest)
            answer = NotGiven(why=Why.ABSENT, message="the bytes can't be read")
        give.reading -= 1
        give.at = self._loop.time()
        if give.ended:
            self._let_go(give)
        elif reply(answer) and isinstance(answer, Given):
            give.given += len(answer.data)
        else:
            # it is gone, or reads nothing any more
            self._end((reply.peer, give.digest))

    def _read(self, give: _Give, offset: int, length: int) -> bytes:
        """On a thread: the extent is pinned, the file is open, for as long as anything of it is being read."""
        if give.file is not None:
            return os.pread(give.file, length, offset)
        assert self._arena is not None and give.extent is not None, "what is resident lies there"
        with self._arena.read(give.extent) as view:
            return bytes(view[offset : offset + length])

    def _end(self, key: _Key) -> None:
        give = self._gives.pop(key, None)
        if give is not None:
            give.ended = True
            self._let_go(give)

    def _let_go(self, give: _Give) -> None:
        if give.reading:
            return
        if give.file is not None:
            os.close(give.file)
        self._apply(GiveEnded(give=give.number, digest=give.digest, given_bytes=give.given))


def _wrong(ask: Take) -> NotGiven | None:
    """What is wrong with an ask, whatever is here."""
    field, message = "", ""
    if not is_digest(ask.digest):
        field, message = "digest", "expected 64 lower-case hex digits"
    elif not 0 < ask.length <= MAX_CHUNK_BYTES:
        field, message = "length", f"expected 1 to {MAX_CHUNK_BYTES}, got {ask.length}"
    elif ask.offset < 0:
        field, message = "offset", f"expected 0 or more, got {ask.offset}"
    return NotGiven(why=Why.INVALID, message=f"{field}: {message}", field=field) if field else None
