"""What a process may have of the host's GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from wire.outcomes import InvalidRequest

_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def gpu_is_there() -> bool:
    """Whether NVIDIA's driver shows one; torch, which could say whether it works, is not asked."""
    return Path("/dev/nvidia0").exists()


def check_share(environment: Mapping[str, str | None], who: str) -> None:
    """Raises InvalidRequest where MPS is to give ``who`` a part of the GPU's multiprocessors.

    cuBLAS multiplies wrongly then: with 60 and with 80 percent of an H200's, some products of plain bf16 matrices were
    off by more than their own size, and most of those were finite. A default that was set in the MPS daemon is not
    seen.
    """
    percentage = environment.get(_PERCENTAGE) or "100"
    try:
        whole = float(percentage) >= 100
    except ValueError:
        whole = False
    if not whole:
        raise InvalidRequest(
            f"{who} would run with {_PERCENTAGE}={percentage}: on a part of a GPU cuBLAS gives wrong products; leave "
            "it unset, and let a trainer give way with CUDA_MPS_CLIENT_PRIORITY",
            field="env",
        )
