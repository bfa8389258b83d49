"""The registrar: gathers commands into batches, has each made durable by one fsync, then answers and announces it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from wire.events import Event
from wire.outcomes import DeadlinePassed, JournalUnavailable, RoostError
from wire.registrar import (
    AnyAnswer,
    AnyCommand,
    AwaitPosition,
    Collected,
    CollectOrphans,
    Committed,
    Noted,
    Reached,
    ReportInUse,
)

from . import inputs
from .batch import Batch, BatchAnswer, BatchCommand, BatchLedger, refusal
from .blobs import Swept
from .in_use import InUse
from .positions import Positions

_log = logging.getLogger(__name__)

_QUEUE_MAX = 16_384
# those who only wait for a position have a bound of their own: they must not keep writers out
_WAITERS_MAX = 4096
# no journal grows by more within the longest wait: whoever names a position beyond it waits for nothing
_AHEAD_MAX = 100_000_000
_HOUSEKEEPING_S = 60.0
# events of a batch that are announced one by one: any number of askers make fewer, and an import more
_ANNOUNCED = 2000


class Reply(Protocol):
    """Where one answer goes (wire.sockets.Reply is one)."""

    @property
    def expired(self) -> bool: ...

    def __call__(self, answer: AnyAnswer, /) -> object: ...


class Registrar:
    """Group commit. Made and used on one event loop; the ledger runs on a thread of its own.

    While a batch is being fsynced the next one gathers, so that commits a second grow with the number of askers and
    not with the speed of the disk. An answer is given only when its batch is durable, and an event is announced only
    when it is in this host's view. Where a follower fills the view, it says so with ``advance``, and who is told of a
    commit is told up to ``view_wait_s`` later, so that he reads what he wrote.
    ``failed`` is done, with the reason, once the journal can't be trusted: nothing is committed after that.
    """

    def __init__(
        self, ledger: BatchLedger, *, publish: Callable[[Event], object], batch_max: int, view_wait_s: float = 1.0
    ) -> None:
        self._ledger = ledger
        self._publish = publish
        self._batch_max = batch_max
        self._view_wait_s = view_wait_s
        self._loop = asyncio.get_running_loop()
        # of writers, who are told once this host's view has their event, and of those who only want to know
        self._positions = Positions(ledger.position())
        self._followed = Positions(ledger.position())
        self.in_use = InUse()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self._waiting: deque[tuple[BatchCommand, Reply]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._committing = False
        self._sweeping = False
        self._unavailable: JournalUnavailable | None = None
        self._housekeeping = self._loop.call_later(_HOUSEKEEPING_S, self._housekeep)
        self.failed: asyncio.Future[JournalUnavailable] = self._loop.create_future()

    def take(self, command: AnyCommand, reply: Reply) -> None:
        """Queue a command; ``reply`` is called once, later, on the loop."""
        if self._unavailable is not None:
            reply(refusal(self._unavailable))
        elif isinstance(command, CollectOrphans):
            self._start(self._collect(command, reply))
        elif isinstance(command, AwaitPosition):
            self._await_position(command, reply)
        elif isinstance(command, ReportInUse):
            self._note(command, reply)
        elif len(self._waiting) + len(self._positions) >= _QUEUE_MAX:
            reply(refusal(JournalUnavailable(f"{_QUEUE_MAX} commands wait for the registrar", retry_after_s=1.0)))
        else:
            self._waiting.append((command, reply))
            if not self._committing:
                self._committing = True
                self._start(self._commit_batches())

    def advance(self, events: Sequence[Event]) -> None:
        """These events are in this host's view now: announce them, and tell those who wait for them."""
        # of many at once the last: who follows finds that he lacks those before it, and reads them from the journal
        for event in events if len(events) <= _ANNOUNCED else events[-1:]:
            self._publish(event)
        if events:
            self._positions.reach(events[-1].seq)
            self._followed.reach(events[-1].seq)

    def fail(self, error: Exception) -> None:
        """Commit nothing any more, for this reason."""
        self._fail(error, [])

    async def stop(self) -> None:
        """Take nothing more, finish what was taken, and free the thread."""
        self._unavailable = self._unavailable or JournalUnavailable("the registrar is stopping", retry_after_s=1.0)
        self._housekeeping.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._positions.give_up()
        self._followed.give_up()
        self._thread.shutdown()

    async def _commit_batches(self) -> None:
        """One batch after another. The next one is given to the ledger before the last one is answered."""
        running: asyncio.Future[Batch] | None = None
        unanswered: deque[Reply] = deque()
        following: deque[Reply] = deque()
        try:
            running, unanswered = self._submit()
            while running is not None:
                done = await running
                running, following = self._submit()
                self.advance(done.events)
                for answer in done.answers:
                    self._answer(unanswered.popleft(), answer)
                if running is None:
                    # who was answered may have asked again
                    running, following = self._submit()
                unanswered, following = following, unanswered
        except Exception as error:
            # also what goes wrong after the commit: a registrar that answers nobody must not live on
            self._fail(error, [*unanswered, *following])
            if running is not None:
                await asyncio.wait({running})
        self._committing = False

    def _submit(self) -> tuple[asyncio.Future[Batch] | None, deque[Reply]]:
        """Give the next batch to the ledger; what it is and who waits for it, or None where nobody does."""
        batch = self._next_batch()
        if not batch:
            return None, deque()
        commands = [command for command, _ in batch]
        running = self._loop.run_in_executor(self._thread, self._ledger.run, commands)
        return running, deque(reply for _, reply in batch)

    def _answer(self, reply: Reply, answer: BatchAnswer) -> None:
        if isinstance(answer, Committed):
            # durable all the same where the view takes too long: a late answer would be taken for none
            self._positions.when(
                answer.seq, lambda: reply(answer), timeout_s=self._view_wait_s, otherwise=lambda: reply(answer)
            )
        else:
            reply(answer)

    def _note(self, command: ReportInUse, reply: Reply) -> None:
        try:
            inputs.check_report(command)
        except RoostError as error:
            reply(refusal(error))
        else:
            self.in_use.note(command)
            reply(Noted())

    def _await_position(self, command: AwaitPosition, reply: Reply) -> None:
        reached = self._followed.reached
        try:
            inputs.check_wait(command, most=reached + _AHEAD_MAX)
            if command.seq > reached and len(self._followed) >= _WAITERS_MAX:
                raise JournalUnavailable(f"{_WAITERS_MAX} others wait for a position", retry_after_s=1.0)
        except RoostError as error:
            reply(refusal(error))
            return
        self._followed.when(
            command.seq,
            lambda: reply(Reached(position=self._followed.reached)),
            timeout_s=command.timeout_s,
            otherwise=lambda: reply(refusal(self._not_yet(command.seq))),
        )

    def _not_yet(self, seq: int) -> DeadlinePassed:
        return DeadlinePassed(f"the view is at event {self._followed.reached}, not yet at {seq}", retry_after_s=1.0)

    def _next_batch(self) -> list[tuple[BatchCommand, Reply]]:
        """The oldest commands that somebody still waits for: who has given up may ask again, and must not find that
        both happened."""
        batch: list[tuple[BatchCommand, Reply]] = []
        while self._waiting and len(batch) < self._batch_max:
            command, reply = self._waiting.popleft()
            if reply.expired:
                reply(refusal(DeadlinePassed("the deadline passed before the command's turn came")))
            else:
                batch.append((command, reply))
        return batch

    async def _collect(self, command: CollectOrphans, reply: Reply) -> None:
        """Sweep between batches: a step takes a turn on the ledger's thread like a batch does.

        One at a time, and no step once the registrar stops: what is left is there for the next one.
        """
        if self._sweeping:
            reply(refusal(JournalUnavailable("a clean-up of the store is running already", retry_after_s=10.0)))
            return
        self._sweeping = True
        total = Swept(0, 0)
        try:
            steps = self._ledger.sweep(command)
            while step := await self._loop.run_in_executor(self._thread, next, steps, None):
                total = total.plus(step)
                if self._unavailable is not None:
                    raise self._unavailable
        except RoostError as error:
            reply(refusal(error))
        except Exception as error:
            self._fail(error, [reply])
        else:
            reply(Collected(removed=total.removed, bytes=total.bytes))
        finally:
            self._sweeping = False

    def _fail(self, error: Exception, replies: list[Reply]) -> None:
        _log.error("the registrar stops: %s", error, exc_info=error)
        reason = error.message if isinstance(error, RoostError) else f"{type(error).__name__}: {error}"
        self._unavailable = JournalUnavailable(f"the registrar failed: {reason}", retry_after_s=1.0)
        for reply in replies + [reply for _, reply in self._waiting]:
            reply(refusal(self._unavailable))
        self._waiting.clear()
        if not self.failed.done():
            self.failed.set_result(self._unavailable)

    def _housekeep(self) -> None:
        self._housekeeping = self._loop.call_later(_HOUSEKEEPING_S, self._housekeep)
        self._start(self._on_ledger_thread(self._ledger.housekeep))

    async def _on_ledger_thread(self, work: Callable[[], None]) -> None:
        await self._loop.run_in_executor(self._thread, work)

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
