"""The device of a rank."""

from __future__ import annotations

import os
from typing import Any

import torch

from backends.gpu_share import check_share
from backends.trainer import TrainerSettings

from .parallel import local_rank


def start_device(settings: TrainerSettings) -> torch.device:
    """This rank's device, with torch set to give the same bits each time. Raises InvalidRequest."""
    torch.use_deterministic_algorithms(True)
    # memory that nobody wrote is never read here: filling it would cost a pass over it
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False
    if settings.threads:
        torch.set_num_threads(settings.threads)
    cuda = torch.cuda.is_available() if settings.device == "auto" else settings.device == "cuda"
    if cuda:
        check_share(os.environ, f"trainer {settings.name}")
        # demanded by deterministic algorithms; read when cuBLAS is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
        return device
    from .cpu_shim import install

    install()
    return torch.device("cpu")
