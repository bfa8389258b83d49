"""``python -m tests.gateway.training.process --settings FILE``: a training service over the fake trainer."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from catalog.service import run_service
from gateway.training.service import TrainingService
from gateway.training.settings import TrainingSettings

from .fake_trainer import FakeTrainer


def make(settings: TrainingSettings) -> FakeTrainer:
    trainer = FakeTrainer(settings.trainer, Path(settings.state_dir) / "trainer")
    trainer.pause_s = 0.04
    return trainer


async def serve(settings: TrainingSettings, stop: asyncio.Event) -> None:
    service = await TrainingService.start(settings, make=make)
    print("ready", flush=True)
    await stop.wait()
    await service.stop()


if __name__ == "__main__":
    sys.exit(run_service("tests.gateway.training.process", __doc__ or "", TrainingSettings, serve))
