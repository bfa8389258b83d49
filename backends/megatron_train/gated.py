"""The gated activation of a dense block, SwiGLU (arXiv 2002.05202): what it keeps for backward is its input alone."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP

from .kernels import kernels_of


class GatedMLP(MLP):  # type: ignore[misc]
    """Megatron's block, with ``gated`` between its linears."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        both, _bias = self.linear_fc1(hidden_states)
        lowered: tuple[torch.Tensor, torch.Tensor | None] = self.linear_fc2(gated(both))
        return lowered


def gated(both: torch.Tensor) -> torch.Tensor:
    """(..., gate beside up) -> silu(gate) * up."""
    inner: torch.Tensor = _Gated.apply(both)  # type: ignore[no-untyped-call]
    return inner


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(both)
        return kernels_of(both).gate(both)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> torch.Tensor:
        (both,) = ctx.saved_tensors
        return kernels_of(both).gate_gradient(upstream[0], both)
