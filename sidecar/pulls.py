"""From trainers into the arena: their offers heard, and chunks pulled while the file is still being written."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import Any

from blake3 import blake3

from wire.outcomes import ArtifactUnavailable, EngineFailed, RoostError
from wire.sockets import FeedSubscriber, Requester, Sockets
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
    Pulled,
    Withdrawn,
)

from .arena import Arena
from .effects import CancelPull, StartPull
from .events import AnyEvent, PullDone, PullFailed, TransferBound, TransferOffered, TransferWithdrawn
from .extents import Extent
from .settings import SidecarSettings, TrainerAddress

_log = logging.getLogger(__name__)

# large enough for little to be said a byte, small enough to be on its way while the next one is written; of the
# second kind only the place travels
_CHUNK_BYTES, _LOCAL_BYTES = 1 << 20, MAX_CHUNK_BYTES
# the largest message is a chunk and little beside it
_MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + 4096
# a trainer that gives nothing for so long has stopped writing
_STALL_S = 15.0
_THREADS = 2
_NEEDED_NO_MORE = "it is needed no more"


class Pulls:
    """Follows ``settings.trainers``. ``emit`` gets every event on the loop's thread."""

    def __init__(
        self, settings: SidecarSettings, arena: Arena, emit: Callable[[AnyEvent], None], *, sockets: Sockets
    ) -> None:
        self._node = settings.node
        self._arena = arena
        self._emit = emit
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._trainers = {address.endpoint: _Trainer(address, settings, emit, sockets) for address in settings.trainers}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pull")

    @property
    def heard(self) -> bool:
        """Whether every trainer's offers are followed: what was offered before is lost."""
        return not any(trainer.feed.silent for trainer in self._trainers.values())

    def start(self, effect: StartPull) -> None:
        task = asyncio.get_running_loop().create_task(self._run(effect))
        self._tasks[effect.transfer] = task
        task.add_done_callback(lambda task: self._on_ended(task, effect))

    def cancel(self, effect: CancelPull) -> None:
        self._tasks[effect.transfer].cancel()

    async def close(self) -> None:
        """End the pulls that are under way; nobody writes to the arena afterwards."""
        for trainer in self._trainers.values():
            trainer.feed.close()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for trainer in self._trainers.values():
            trainer.chunks.close()
        self._threads.shutdown()

    def _on_ended(self, task: asyncio.Task[None], effect: StartPull) -> None:
        del self._tasks[effect.transfer]
        if task.cancelled():
            # before it had begun: nothing else has told its end
            generation = effect.extent.generation
            self._emit(PullFailed(transfer=effect.transfer, generation=generation, message=_NEEDED_NO_MORE))

    async def _run(self, effect: StartPull) -> None:
        """One pull from its start to its end, which is always told."""
        transfer, generation = effect.transfer, effect.extent.generation
        chunks = self._trainers[effect.trainer].chunks
        ended: AnyEvent
        try:
            with closing(_Filling(self._arena, effect.extent)) as filling:
                digest = await _Pull(self._node, transfer, chunks, filling, self._threads).run()
        except RoostError as error:
            ended = PullFailed(transfer=transfer, generation=generation, message=error.message)
        except asyncio.CancelledError:
            ended = PullFailed(transfer=transfer, generation=generation, message=_NEEDED_NO_MORE)
        except Exception as error:
            # whatever it was, the extent is free again and the store has the bytes
            _log.exception("the pull of %s", transfer)
            ended = PullFailed(transfer=transfer, generation=generation, message=repr(error))
        else:
            ended = PullDone(transfer=transfer, generation=generation, digest=digest)
        self._emit(ended)
        chunks.send(Pulled(transfer=transfer, node=self._node, ok=isinstance(ended, PullDone)))


class _Trainer:
    """The two connections to one trainer."""

    def __init__(
        self, address: TrainerAddress, settings: SidecarSettings, emit: Callable[[AnyEvent], None], sockets: Sockets
    ) -> None:
        self._endpoint = address.endpoint
        self._emit = emit
        keys = {"curve": settings.curve, "server_public": address.public}
        self.feed: FeedSubscriber[OfferOfTrainer] = sockets.subscriber(
            address.feed_endpoint, OfferOfTrainer, on_message=self._on_message, on_gap=_nothing, **keys
        )
        self.chunks: Requester[AskOfTransfer, AnswerOfTransfer] = sockets.requester(
            address.endpoint,
            AskOfTransfer,
            AnswerOfTransfer,
            peer="the trainer",
            gone=EngineFailed,
            max_bytes=_MAX_MESSAGE_BYTES,
            **keys,
        )

    def _on_message(self, number: int, message: OfferOfTrainer) -> None:
        if isinstance(message, Offered):
            self._emit(TransferOffered(trainer=self._endpoint, offer=message))
        elif isinstance(message, Bound):
            self._emit(TransferBound(transfer=message.transfer, digest=message.digest))
        elif isinstance(message, Withdrawn):
            self._emit(TransferWithdrawn(transfer=message.transfer))


class _Filling:
    """One extent and what is written there, on threads but never on two at a time."""

    def __init__(self, arena: Arena, extent: Extent) -> None:
        self.size = extent.length
        self._arena = arena
        self._extent = extent
        self._hasher = blake3()
        self._view: memoryview | None = None
        self._done = 0
        self._file: int | None = None

    def begin(self) -> None:
        """Raises StorageFull."""
        self._view = self._arena.begin(self._extent)

    def add(self, chunk: Chunk, length: int) -> bool:
        """Take the next ``length`` bytes; False where they were to be read from a file that is gone by now.

        Raises ArtifactUnavailable where the chunk has others, or they can't be read.
        """
        assert self._view is not None, "it has begun"
        place = self._view[self._done : self._done + length]
        if chunk.path:
            if not self._opened(chunk.path):
                return False
            self._read(place)
        elif len(chunk.data) == length:
            place[:] = chunk.data
        else:
            raise ArtifactUnavailable(f"a chunk has {len(chunk.data)} bytes, not {length}")
        self._hasher.update(place)
        self._done += length
        return True

    def seal(self, digest: str) -> None:
        """It is whole. Raises ArtifactUnavailable where it is not of ``digest``."""
        found = self._hasher.hexdigest()
        if found != digest:
            raise ArtifactUnavailable(f"what was pulled has digest {found}, not {digest or 'one that was told'}")
        self._arena.seal(self._extent, digest)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def _opened(self, path: str) -> bool:
        """The file that has the name now, or else the one that had it: it may be published and gone."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return self._file is not None
        except OSError as error:
            raise ArtifactUnavailable(f"the revision's file can't be read: {error.strerror}") from error
        self.close()
        self._file = file
        return True

    def _read(self, place: memoryview) -> None:
        assert self._file is not None, "it was opened"
        try:
            count = os.preadv(self._file, [place], self._done)
        except OSError as error:
            raise ArtifactUnavailable(f"the revision's file can't be read: {error.strerror}") from error
        if count != len(place):
            raise ArtifactUnavailable(f"the revision's file has {count} bytes at {self._done}, not {len(place)}")


class _Pull:
    """At most ``CHUNK_CREDITS`` chunks are asked for at a time, and taken in order."""

    def __init__(
        self,
        node: str,
        transfer: str,
        chunks: Requester[AskOfTransfer, AnswerOfTransfer],
        filling: _Filling,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._node = node
        self._transfer = transfer
        self._chunks = chunks
        self._filling = filling
        self._threads = threads
        self._same_host = self._local = chunks.endpoint.startswith("ipc://")
        self._step = _LOCAL_BYTES if self._local else _CHUNK_BYTES

    async def run(self) -> str:
        """The digest of what the extent holds then, sealed. However it ends, nobody writes there afterwards.

        Raises EngineFailed (the trainer is gone, or has no such bytes), DeadlinePassed (it gives nothing),
        ArtifactUnavailable (they are not of the digest that it says), StorageFull.
        """
        size, step = self._filling.size, self._step
        starts = iter(range(0, size, step))
        # the trainer is to know that we pull before there is memory for what comes
        ahead = deque(self._ask(start) for start in islice(starts, CHUNK_CREDITS))
        digest = ""
        try:
            await self._in_thread(self._filling.begin)
            for start in range(0, size, step):
                chunk = await ahead[0]
                del ahead[0]
                ahead.extend(self._ask(following) for following in islice(starts, 1))
                if not await self._in_thread(self._filling.add, chunk, self._length(start)):
                    self._local = False
                    chunk = await self._chunk(start)
                    await self._in_thread(self._filling.add, chunk, self._length(start))
                digest = chunk.digest
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)
        self._filling.seal(digest)
        return digest

    def _length(self, start: int) -> int:
        return min(self._step, self._filling.size - start)

    def _ask(self, start: int) -> asyncio.Task[Chunk]:
        return asyncio.create_task(self._chunk(start))

    async def _chunk(self, start: int) -> Chunk:
        ask = Pull(
            transfer=self._transfer, node=self._node, offset=start, length=self._length(start), local=self._local
        )
        answer = await self._chunks.request(ask, timeout_s=_STALL_S)
        if not isinstance(answer, Chunk):
            raise EngineFailed(f"the trainer gives no more: {answer.message}")
        if answer.path and not self._same_host:
            raise ArtifactUnavailable("path: a trainer on another host can't name files of this one")
        return answer

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Not left before ``work`` has ended, cancelled or not."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise


def _nothing(expected: int, got: int) -> None:
    """What was lost is not made up for: it is fetched when it is asked for."""
