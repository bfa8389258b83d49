"""Every run's operations, one after the other; runs go side by side. Started again, it goes on where the journal is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from msgspec.structs import replace

from wire.outcomes import JournalUnavailable, RoostError, StorageFull

from .executor import Done, Executor
from .failures import failed, until_written
from .futures import Futures
from .journal import Effects, Journal
from .ordering import Line
from .records import OperationRecord, RunRecord
from .trainees import TrainerDead
from .work import Sample

_log = logging.getLogger(__name__)

# before an operation that has no result is done again
_RETRY_S = 1.0


class Lines:
    """A task for each run that has something to do."""

    def __init__(self, journal: Journal, executor: Executor, futures: Futures, *, gap_s: float) -> None:
        self._journal = journal
        self._executor = executor
        self._futures = futures
        self._gap_s = gap_s
        self._lines: dict[str, Line] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._gaps: dict[str, asyncio.TimerHandle] = {}
        # runs that end once nothing of theirs waits
        self._ending: set[str] = set()
        self.pending_bytes = 0

    def admit(self, operation: OperationRecord) -> None:
        """An operation that is in the journal, to be run in its turn."""
        line = self._lines.get(operation.owner)
        if line is None:
            run = self._journal.run(operation.owner)
            assert run is not None, "operations are logged for runs that are there"
            line = self._lines[operation.owner] = Line(run.next_seq)
        line.add(operation.seq, operation.request_id)
        self.pending_bytes += operation.nbytes
        self._go_on(operation.owner, line)

    def end(self, model_id: str) -> None:
        """End a run that gets no more operations, once those that it has are done."""
        self._ending.add(model_id)
        self._go_on(model_id, self._lines.get(model_id) or Line(0))

    async def stop(self) -> None:
        """End; operations without a result stay in the journal."""
        for gap in self._gaps.values():
            gap.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _go_on(self, model_id: str, line: Line) -> None:
        if model_id in self._tasks:
            return
        gap = self._gaps.pop(model_id, None)
        if gap is not None:
            gap.cancel()
        if line.first() is not None:
            self._start(model_id, line, self._work(model_id, line))
        elif line.gapped:
            loop = asyncio.get_running_loop()
            self._gaps[model_id] = loop.call_later(self._gap_s, self._give_up, model_id, line)
        elif model_id in self._ending:
            self._start(model_id, line, self._end(model_id))

    def _start(self, model_id: str, line: Line, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[model_id] = asyncio.create_task(work, name=model_id)
        task.add_done_callback(lambda _: self._rest(model_id, line))

    def _rest(self, model_id: str, line: Line) -> None:
        task = self._tasks.pop(model_id)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            _log.error("the line of %s broke", model_id, exc_info=error)
            return
        if not line.gapped and line.first() is None:
            self._lines.pop(model_id, None)
        self._go_on(model_id, line)

    async def _work(self, model_id: str, line: Line) -> None:
        while (request_id := line.first()) is not None:
            run, operation = self._journal.run(model_id), self._journal.operation(request_id)
            assert run is not None and operation is not None, "what waits is in the journal"
            try:
                await self._perform(run, operation, line)
            except (JournalUnavailable, StorageFull, TrainerDead) as error:
                _log.warning("%s is to be done again: %s", request_id, error.message)
                await asyncio.sleep(_RETRY_S)
                continue
            line.passed()
            self.pending_bytes -= operation.nbytes
            self._futures.resolved(request_id)

    async def _perform(self, run: RunRecord, operation: OperationRecord, line: Line) -> None:
        ask = self._journal.ask(operation.request_id)
        assert not isinstance(ask, Sample), "samples are no run's"
        try:
            done = await self._executor.run(run, ask, lambda: line.more)
        except TrainerDead:
            raise
        except Exception as error:
            result = failed(error, f"operation {operation.seq} ({type(ask).__name__}) of {run.model_id}")
            done = Done(result, Effects(run))
        moved = replace(done.effects.run, next_seq=operation.seq + 1)
        await self._journal.resolve(operation, done.result, done.effects._replace(run=moved))
        self._executor.recorded(run.model_id)

    async def _end(self, model_id: str) -> None:
        run = self._journal.run(model_id)
        try:
            if run is not None:
                await until_written(lambda: self._executor.end(run))
        except RoostError as error:
            # the next life of the service tries again
            _log.warning("%s can't be ended: %s", model_id, error.message)
        self._ending.discard(model_id)

    def _give_up(self, model_id: str, line: Line) -> None:
        self._gaps.pop(model_id, None)
        if line.gapped and model_id not in self._tasks:
            self._start(model_id, line, self._lose(model_id, line))

    async def _lose(self, model_id: str, line: Line) -> None:
        lost = await until_written(lambda: self._journal.resolve_lost(model_id))
        if lost:
            line.go_past(lost[-1].seq)
        for operation in lost:
            self.pending_bytes -= operation.nbytes
            self._futures.resolved(operation.request_id)
