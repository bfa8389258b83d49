"""Joins a rank to the others, and makes the process groups."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from backends.trainer import TrainerSettings

from .hf_config import BaseConfig
from .topology import Topology, check_topology

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class Groups(NamedTuple):
    """The process groups that our own reductions run over."""

    tensor: Any
    data: Any
    expert_data: Any
    world: Any
    device: torch.device


def start_parallel(settings: TrainerSettings, base: BaseConfig, device: torch.device) -> tuple[Topology, Groups]:
    """Join the other ranks, which torchrun's environment names, and make Megatron's groups.

    Raises InvalidRequest or Unfit where the base can't be shared out like that.
    """
    check_topology(settings, base)
    sequence = settings.sequence_parallel and settings.tensor > 1
    backend = "nccl" if device.type == "cuda" else "gloo"
    bound = device if device.type == "cuda" else None
    dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT, device_id=bound)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.tensor,
        pipeline_model_parallel_size=settings.pipeline,
        expert_model_parallel_size=settings.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    # nothing here is drawn at random, but Megatron saves and restores its random states
    model_parallel_cuda_manual_seed(1)
    topology = Topology(
        tensor=settings.tensor,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline=settings.pipeline,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data=settings.data,
        data_rank=parallel_state.get_data_parallel_rank(),
        expert=settings.expert,
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_data=parallel_state.get_expert_data_parallel_world_size(),
        expert_data_rank=parallel_state.get_expert_data_parallel_rank(),
        sequence=sequence,
        rank=dist.get_rank(),
        world=dist.get_world_size(),
    )
    groups = Groups(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        expert_data=parallel_state.get_expert_data_parallel_group(),
        world=dist.group.WORLD,
        device=device,
    )
    return topology, groups


def stop_parallel() -> None:
    """Leave the groups."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def local_rank() -> int:
    """Which of its host's devices this rank has."""
    return int(os.environ.get("LOCAL_RANK", "0"))
