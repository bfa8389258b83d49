"""The device of a rank."""

from __future__ import annotations

import os
from typing import Any

import torch

from backends.trainer import TrainerSettings
from wire.outcomes import InvalidRequest

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
        check_share(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""))
        # demanded by deterministic algorithms; read when cuBLAS is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
        return device
    from .cpu_shim import install

    install()
    return torch.device("cpu")


def check_share(percentage: str) -> None:
    """Raises InvalidRequest where MPS is to give a process a part of the GPU's multiprocessors.

    cuBLAS multiplies wrongly then: with 60 and with 80 percent of an H200's, some products of plain bf16 matrices were
    off by more than their own size, and most of those were finite.
    """
    try:
        whole = not percentage or float(percentage) >= 100
    except ValueError:
        whole = False
    if not whole:
        raise InvalidRequest(
            f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is {percentage}: on a part of a GPU cuBLAS gives wrong products, and"
            " gradients with them; leave it unset, and give way with CUDA_MPS_CLIENT_PRIORITY",
            field="env",
        )
