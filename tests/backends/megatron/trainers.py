"""Trainers for tests: one whose only rank is in this process, and ones with ranks of their own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.megatron_train.control import MegatronTrainer
from backends.megatron_train.launcher import RanksDied
from packer.revision import RevisionFile
from tests.backends.megatron.bases import resident, settings_for
from wire.outcomes import RoostError
from wire.trainer import AnswerOfRank, AskOfRank, Failed


class LocalRanks:
    """The one rank in this process. ``die_before`` names messages at whose next coming the rank dies once."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.alive = False
        self.die_before: list[type] = []
        self.starts = 0

    async def start(self) -> None:
        self.alive = True
        self.starts += 1

    async def ask(self, ask: AskOfRank, *, timeout_s: float) -> Sequence[AnswerOfRank]:
        if type(ask) in self.die_before:
            self.die_before.remove(type(ask))
            self.alive = False
        if not self.alive:
            raise RanksDied("the rank died")
        try:
            return [self._answer(ask)]
        except RoostError as error:
            return [Failed(outcome=error.outcome, message=error.message, field=error.field)]

    async def stop(self) -> None:
        self.alive = False


@contextlib.asynccontextmanager
async def local_trainer(base: Path, folder: Path, **changes: Any) -> AsyncIterator[MegatronTrainer]:
    """A trainer whose rank is this process."""
    with resident(base, folder / "scratch", **changes) as rank:
        trainer = MegatronTrainer(
            settings_for(base, **changes), state_dir=folder, log_dir=folder, ranks=LocalRanks(rank.answer)
        )
        await trainer.start()
        try:
            yield trainer
        finally:
            await trainer.stop()


@contextlib.asynccontextmanager
async def real_trainer(base: Path, folder: Path, **changes: Any) -> AsyncIterator[MegatronTrainer]:
    """A trainer with processes of its own."""
    pytest.importorskip("megatron.core")
    trainer = MegatronTrainer(settings_for(base, **changes), state_dir=folder, log_dir=folder)
    await trainer.start()
    try:
        yield trainer
    finally:
        await trainer.stop()


async def exported(trainer: MegatronTrainer, policy: str, path: Path, dtype: str = "F32") -> RevisionFile:
    """The policy's revision file, checked against what the trainer said of it."""
    facts = await trainer.export_revision(policy, path, dtype=dtype)
    file = RevisionFile.open(path)
    assert facts == file.facts()
    return file
