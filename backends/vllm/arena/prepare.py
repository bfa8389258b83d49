"""What a worker needs for installs through the arena, made once its model is loaded and before it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from backends.arena.segment import Segments
from backends.vllm import versions
from packer.shape import BaseShape

from .adaptable import Adaptable
from .install import Installer
from .writer import SlotWriter


def installer_for(worker: Any) -> Installer:
    """Raises UnsupportedVllm, Unfit or InvalidRequest for a base that we don't know, and whatever a device says."""
    from vllm.distributed import get_pp_group

    versions.check(versions.WORKER_SEAMS)
    manager = worker.model_runner.lora_manager._adapter_manager
    versions.check_attributes(manager, versions.MANAGER_ATTRIBUTES)
    adaptable = Adaptable.of(manager, _shape_of(worker.model_config), split_over_layers=get_pp_group().world_size > 1)
    writer = _writer_for(manager.device, manager.lora_config.lora_dtype)
    installer = Installer(manager, adaptable, writer, Segments(writer))
    installer.try_out()
    return installer


def _shape_of(config: Any) -> BaseShape:
    file = Path(config.model) / "config.json"
    return BaseShape.from_config(file.read_bytes() if file.is_file() else config.hf_config.to_json_string().encode())


def _writer_for(device: torch.device, dtype: torch.dtype) -> SlotWriter:
    if device.type == "cpu":
        from .cpu import CpuWriter

        return CpuWriter()
    from .cuda import CudaWriter

    return CudaWriter(device, dtype=dtype)
