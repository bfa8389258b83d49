"""A rank's base and policies, and what it answers to each message. All ranks get the same messages in order."""

from __future__ import annotations

from functools import singledispatchmethod
from pathlib import Path

import torch

from backends.trainer import TrainerSettings
from wire.outcomes import InvalidRequest
from wire.trainer import (
    AnswerOfRank,
    AskLimits,
    AskMemory,
    AskOfRank,
    CreatePolicy,
    Done,
    ExportLayers,
    ForwardBackward,
    LoadState,
    MemoryReport,
    OptimStep,
    PolicyStatus,
    RemovePolicy,
    SaveState,
    TrainerLimits,
)

from .checkpoint import read_part, write_part
from .device import start_device
from .engine import Engine
from .export import write_layers
from .hf_config import context_of, dtype_of, read_base
from .layout import check_spec, make_layout, pairs_of
from .model import build_model
from .parallel import start_parallel
from .policy import Policy, first_values
from .tiers import Tiers
from .weights import load_weights


class Resident:
    """One base, loaded, and the policies over it. Errors are RoostErrors, the same on every rank; others are fatal."""

    def __init__(self, settings: TrainerSettings, scratch: Path) -> None:
        self._settings = settings
        self._device = start_device(settings)
        self._base = read_base(Path(settings.model_path))
        self._dtype = dtype_of(settings)
        self._topology, self._groups = start_parallel(settings, self._base, self._device)
        model = build_model(self._base, self._topology, self._device, self._dtype, recompute=settings.recompute)
        self._base_bytes = load_weights(model, self._base, self._topology, Path(settings.model_path))
        self._engine = Engine(
            model,
            self._base,
            self._topology,
            self._groups,
            self._device,
            micro_batch_tokens=settings.micro_batch_tokens,
            context=context_of(settings, self._base),
        )
        scratch.mkdir(parents=True, exist_ok=True)
        self._tiers = Tiers(
            self._device, device_bytes=settings.device_bytes, host_bytes=settings.host_bytes, scratch=scratch
        )

    @singledispatchmethod
    def answer(self, ask: AskOfRank) -> AnswerOfRank:
        """Do what is asked. Raises RoostErrors, which changed nothing."""
        raise InvalidRequest(f"a rank can't answer {type(ask).__name__}")

    @answer.register
    def _(self, ask: AskLimits) -> AnswerOfRank:
        return TrainerLimits(
            architecture=self._base.shape.architecture,
            targets=self._base.targets,
            max_rank=self._settings.max_rank,
            max_context=context_of(self._settings, self._base),
            vocabulary=self._base.vocabulary,
            dtype=self._dtype,
            world_size=self._topology.world,
        )

    @answer.register
    def _(self, ask: CreatePolicy) -> AnswerOfRank:
        spec = check_spec(ask.spec, self._base, self._settings.max_rank)
        # one that was begun on some ranks alone is begun anew on all
        self._tiers.remove(spec.policy)
        layout = make_layout(spec, self._base, self._topology)
        buffer = torch.zeros((4, layout.size), dtype=torch.float32, device=self._device)
        policy = Policy(spec, layout, buffer)
        if ask.snapshot:
            read_part(policy, Path(ask.snapshot), optimizer=True)
        else:
            first_values(policy, self._base)
        self._tiers.add(policy)
        count = sum(sum(pair.elements) for pair in pairs_of(spec, self._base))
        return PolicyStatus(policy=spec.policy, number=0, step=policy.step, parameters=count)

    @answer.register
    def _(self, ask: ForwardBackward) -> AnswerOfRank:
        return self._engine.forward_backward(self._tiers.use(ask.policy), ask.batch, forward_only=ask.forward_only)

    @answer.register
    def _(self, ask: OptimStep) -> AnswerOfRank:
        return self._engine.optim_step(self._tiers.use(ask.policy), ask.adam)

    @answer.register
    def _(self, ask: SaveState) -> AnswerOfRank:
        name, digest = write_part(
            self._tiers.use(ask.policy),
            Path(ask.path),
            self._topology.rank,
            optimizer=ask.optimizer,
            gradients=ask.gradients,
        )
        return Done(files={name: digest}, step=self._tiers.use(ask.policy).step)

    @answer.register
    def _(self, ask: LoadState) -> AnswerOfRank:
        policy = self._tiers.use(ask.policy)
        read_part(policy, Path(ask.path), optimizer=ask.optimizer)
        return Done(step=policy.step)

    @answer.register
    def _(self, ask: ExportLayers) -> AnswerOfRank:
        policy = self._tiers.use(ask.policy)
        write_layers(policy, self._base, self._topology, self._groups, ask)
        return Done()

    @answer.register
    def _(self, ask: RemovePolicy) -> AnswerOfRank:
        self._tiers.remove(ask.policy)
        return Done()

    @answer.register
    def _(self, ask: AskMemory) -> AnswerOfRank:
        peak = torch.cuda.max_memory_allocated() if self._device.type == "cuda" else 0
        return MemoryReport(
            policies=self._tiers.memory(), base=self._base_bytes, scratch=self._engine.scratch_bytes, peak=peak
        )
