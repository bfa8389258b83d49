"""Backends by name. A driver is imported when it is asked for: a node pays only for the engines it has."""

from __future__ import annotations

from pathlib import Path

from wire.outcomes import EngineFailed, InvalidRequest

from .dialect import Dialect, OpenAI
from .interface import EngineBackend, EngineSettings
from .trainer import TrainerBackend, TrainerSettings

BACKENDS = ("vllm", "sglang")

_OPENAI = OpenAI()


def make_backend(settings: EngineSettings, *, run_dir: Path, log_dir: Path) -> EngineBackend:
    """The driver that ``settings.backend`` names. Raises InvalidRequest for an unknown one, or unfit settings."""
    if settings.backend == "vllm":
        from .vllm.driver import VllmBackend

        return VllmBackend(settings, run_dir=run_dir, log_dir=log_dir)
    if settings.backend == "sglang":
        from .sglang.driver import SglangBackend

        return SglangBackend(settings, run_dir=run_dir, log_dir=log_dir)
    raise _unknown(settings)


def check_settings(settings: EngineSettings) -> None:
    """Whether an engine of ours could be started with these settings. Raises InvalidRequest that names the field."""
    if settings.attach:
        return
    if settings.backend == "sglang":
        from .sglang import command as sglang

        sglang.command_for(settings)
    elif settings.backend == "vllm":
        from .vllm import command as vllm

        vllm.command_for(settings)
    else:
        raise _unknown(settings)


def _unknown(settings: EngineSettings) -> InvalidRequest:
    return InvalidRequest(f"engine {settings.name}: there is no backend {settings.backend!r}", field="backend")


def dialect_of(backend: str) -> Dialect:
    """How engines of the backend are asked. Raises EngineFailed for an unknown one."""
    if backend == "vllm":
        return _OPENAI
    if backend == "sglang":
        from .sglang.dialect import SGLANG

        return SGLANG
    raise EngineFailed(f"nobody here can ask a {backend[:40]!r} engine: is the node newer than this gateway?")


def make_trainer(settings: TrainerSettings, *, state_dir: Path, log_dir: Path) -> TrainerBackend:
    """The driver that ``settings.backend`` names. Raises InvalidRequest for an unknown one, or unfit settings."""
    if settings.backend == "megatron":
        from .megatron_train.control import MegatronTrainer

        return MegatronTrainer(settings, state_dir=state_dir, log_dir=log_dir)
    raise _unknown_trainer(settings)


def check_trainer(settings: TrainerSettings) -> None:
    """Whether the base could be trained with these settings. Raises InvalidRequest or Unfit that name the field."""
    if settings.backend != "megatron":
        raise _unknown_trainer(settings)
    from .megatron_train import control

    control.check_settings(settings)


def _unknown_trainer(settings: TrainerSettings) -> InvalidRequest:
    return InvalidRequest(f"trainer {settings.name}: there is no backend {settings.backend!r}", field="backend")
