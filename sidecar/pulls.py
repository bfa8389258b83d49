"""From trainers into the arena: their offers heard, and chunks pulled while the file is still being written."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from blake3 import blake3

from wire.outcomes import ArtifactUnavailable, EngineFailed, RoostError
from wire.sockets import FeedSubscriber, Requester, Sockets
from wire.transfer import (
    MAX_PULLS,
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

# large enough for little to be said a byte, small enough to be on its way while the next one is written
_CHUNK_BYTES = 1 << 20
# the largest message is a chunk and little beside it
_MAX_MESSAGE_BYTES = _CHUNK_BYTES + 4096
# a trainer that gives nothing for so long has stopped writing
_STALL_S = 15.0
_THREADS = 2


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
        task.add_done_callback(lambda _: self._tasks.pop(effect.transfer))

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

    async def _run(self, effect: StartPull) -> None:
        """One pull from its start to its end, which is always told."""
        transfer, generation = effect.transfer, effect.extent.generation
        chunks = self._trainers[effect.trainer].chunks
        ended: AnyEvent
        try:
            digest = await _Pull(self._node, transfer, chunks, self._arena, effect.extent, self._threads).run()
        except RoostError as error:
            ended = PullFailed(transfer=transfer, generation=generation, message=error.message)
        except asyncio.CancelledError:
            ended = PullFailed(transfer=transfer, generation=generation, message="it is needed no more")
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


class _Pull:
    """One extent being filled. At most ``MAX_PULLS`` chunks are asked for at a time, and taken in order."""

    def __init__(
        self,
        node: str,
        transfer: str,
        chunks: Requester[AskOfTransfer, AnswerOfTransfer],
        arena: Arena,
        extent: Extent,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._node = node
        self._transfer = transfer
        self._chunks = chunks
        self._arena = arena
        self._extent = extent
        self._threads = threads
        self._hasher = blake3()

    async def run(self) -> str:
        """The digest of what the extent holds then, sealed. However it ends, nobody writes there afterwards.

        Raises EngineFailed (the trainer is gone, or has no such bytes), DeadlinePassed (it gives nothing),
        ArtifactUnavailable (they are not of the digest that it says), StorageFull.
        """
        size = self._extent.length
        starts = iter(range(0, size, _CHUNK_BYTES))
        # the trainer is to know that we pull before there is memory for what comes
        ahead = deque(self._ask(start) for start in islice(starts, MAX_PULLS))
        done, digest = 0, ""
        try:
            view = await self._in_thread(self._arena.begin, self._extent)
            while ahead:
                chunk = await ahead[0]
                del ahead[0]
                ahead.extend(self._ask(start) for start in islice(starts, 1))
                await self._in_thread(self._write, view[done : done + len(chunk.data)], chunk.data)
                done += len(chunk.data)
                digest = chunk.digest
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)
        found = self._hasher.hexdigest()
        if found != digest:
            raise ArtifactUnavailable(f"what was pulled has digest {found}, not {digest or 'one that was told'}")
        self._arena.seal(self._extent, digest)
        return digest

    def _ask(self, offset: int) -> asyncio.Task[Chunk]:
        return asyncio.create_task(self._chunk(offset, min(_CHUNK_BYTES, self._extent.length - offset)))

    async def _chunk(self, offset: int, length: int) -> Chunk:
        ask = Pull(transfer=self._transfer, node=self._node, offset=offset, length=length)
        answer = await self._chunks.request(ask, timeout_s=_STALL_S)
        if not isinstance(answer, Chunk):
            raise EngineFailed(f"the trainer gives no more: {answer.message}")
        if len(answer.data) != length:
            raise ArtifactUnavailable(f"a chunk has {len(answer.data)} bytes, not {length}")
        return answer

    def _write(self, place: memoryview, data: bytes) -> None:
        place[:] = data
        self._hasher.update(data)

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
