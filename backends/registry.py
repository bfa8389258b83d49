"""Backends by name. A driver is imported when it is asked for: a node pays only for the engines it has."""

from __future__ import annotations

from pathlib import Path

from wire.outcomes import InvalidRequest

from .interface import EngineBackend, EngineSettings
from .trainer import TrainerBackend, TrainerSettings


def make_backend(settings: EngineSettings, *, run_dir: Path, log_dir: Path) -> EngineBackend:
    """The driver that ``settings.backend`` names. Raises InvalidRequest for an unknown one, or unfit settings."""
    if settings.backend == "vllm":
        from .vllm.driver import VllmBackend

        return VllmBackend(settings, run_dir=run_dir, log_dir=log_dir)
    raise InvalidRequest(f"engine {settings.name}: there is no backend {settings.backend!r}", field="backend")


def make_trainer(settings: TrainerSettings, *, state_dir: Path, log_dir: Path) -> TrainerBackend:
    """The driver that ``settings.backend`` names. Raises InvalidRequest for an unknown one, or unfit settings."""
    if settings.backend == "megatron":
        from .megatron_train.control import MegatronTrainer

        return MegatronTrainer(settings, state_dir=state_dir, log_dir=log_dir)
    raise InvalidRequest(f"trainer {settings.name}: there is no backend {settings.backend!r}", field="backend")
