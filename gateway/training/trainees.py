"""The trainer as runs see it: in fair turns, with a policy brought up to the journal's state before it is used."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from backends.trainer import TrainerBackend
from wire.node import Health
from wire.outcomes import ArtifactUnavailable, EngineFailed, JournalUnavailable, NotFound, StorageFull
from wire.trainer import PolicySpec

from .fairness import Stage, Turns
from .journal import Journal
from .records import RunRecord
from .work import Load, ResumeRun, Step, Train


class TrainerDead(EngineFailed):
    """There is no trainer, and this process gets none any more: what waits is for its next life."""


class Trainees:
    """Runs over one trainer. A run's operations come one at a time; whose turn it is, measured time decides."""

    def __init__(self, trainer: TrainerBackend, journal: Journal) -> None:
        self._trainer = trainer
        self._journal = journal
        self._turns = Turns()
        self._present: set[str] = set()
        # up to which change a run's asks are kept no longer
        self._trimmed: dict[str, int] = {}

    async def paused(self) -> str:
        """Why nothing runs at the moment; empty where it does."""
        health = await self._trainer.health()
        return "" if health is Health.READY else f"the trainer is {health.value}"

    @asynccontextmanager
    async def turn(self, run: RunRecord, stage: Stage, more: Callable[[], bool]) -> AsyncIterator[TrainerBackend]:
        """The trainer, with ``run`` as the journal tells it; ``more`` says whether the run's next operation is there.
        Raises TrainerDead."""
        async with self._turns.turn(run.model_id, stage, more), self._living():
            if run.model_id not in self._present:
                await self._restore(run)
                self._present.add(run.model_id)
            yield self._trainer
            await self._trim(run)

    @asynccontextmanager
    async def first_turn(self, run: RunRecord) -> AsyncIterator[TrainerBackend]:
        """The trainer for a run that it need not have yet. Raises TrainerDead."""
        async with self._turns.turn(run.model_id), self._living():
            yield self._trainer
            self._present.add(run.model_id)

    async def remove(self, run: RunRecord) -> None:
        """Have the trainer forget it. Raises TrainerDead."""
        async with self._turns.turn(run.model_id), self._living():
            await self._trainer.remove_policy(run.model_id)
            self._present.discard(run.model_id)
            self._trimmed.pop(run.model_id, None)

    @asynccontextmanager
    async def _living(self) -> AsyncIterator[None]:
        """Raises TrainerDead in the place of whatever fails because of that."""
        try:
            yield
        except EngineFailed as error:
            if await self._trainer.health() is Health.DEAD:
                raise TrainerDead(f"the trainer is dead: {self._trainer.detail}") from error
            raise

    async def _restore(self, run: RunRecord) -> None:
        """What the trainer's snapshot lacks is done again, and gives the same bits. Raises ArtifactUnavailable."""
        status = await self._trainer.create_policy(spec_of(run))
        changes = list(self._journal.changes(run.model_id, status.number))
        if [number for number, _ in changes] != list(range(status.number + 1, run.number + 1)):
            raise ArtifactUnavailable(
                f"{run.model_id} was at change {run.number}, and the trainer's newest snapshot of it is from change "
                f"{status.number}: go on from a checkpoint in a new run"
            )
        for number, request_id in changes:
            match self._journal.ask(request_id):
                case Train(batch=batch):
                    await self._trainer.forward_backward(run.model_id, batch, number=number)
                case Step(adam=adam):
                    await self._trainer.optim_step(run.model_id, adam, number=number)
                case Load(path=path, optimizer=optimizer) | ResumeRun(path=path, optimizer=optimizer):
                    saved = self._journal.saved(path)
                    if saved is None:
                        raise NotFound(f"{path}, which {run.model_id} was loaded from, is gone", field="path")
                    folder = Path(saved.folder)
                    await self._trainer.load_state(run.model_id, folder, with_optimizer=optimizer, number=number)
        await self._trim(run)

    async def _trim(self, run: RunRecord) -> None:
        """Keep no longer what the trainer has on disk. What can't be written now is for the next time."""
        durable = min(self._trainer.durable(run.model_id), run.number)
        if durable > self._trimmed.get(run.model_id, 0):
            with contextlib.suppress(JournalUnavailable, StorageFull):
                await self._journal.forget_changes(run.model_id, durable)
                self._trimmed[run.model_id] = durable


def spec_of(run: RunRecord) -> PolicySpec:
    return PolicySpec(policy=run.model_id, rank=run.rank, alpha=run.alpha, targets=run.targets, seed=run.seed)
