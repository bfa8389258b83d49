"""Which code makes a layer's passes over memory: plain operations, or on CUDA one kernel each.

Norms are chosen with the model (``cuda_norm.py``). The head has a kernel where its vocabulary is whole (``head.py``).
"""

from __future__ import annotations

from typing import Protocol

import torch

from . import plain_kernels


class Kernels(Protocol):
    """The same on any device, but for rounding."""

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        """(..., gate beside up) -> silu(gate) * up."""

    def gate_gradient(self, upstream: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        """The gradient of ``gate`` for ``both``."""

    def turn(self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """``heads`` (s, b, heads, d), the halves of d as pairs, turned by the angles whose cosines and sines are
        (s, 1, 1, d / 2); the result is contiguous.
        """


def kernels_of(tensor: torch.Tensor) -> Kernels:
    """Those for the device that ``tensor`` is on."""
    if not tensor.is_cuda:
        return plain_kernels
    from . import cuda_kernels

    return cuda_kernels
