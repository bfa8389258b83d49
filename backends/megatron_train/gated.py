"""The gated activation of a dense block, SwiGLU (arXiv 2002.05202): what it keeps for backward is its input alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.transformer.mlp import MLP


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
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> torch.Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        gradient = torch.empty_like(both)
        of_gate, of_up = gradient.chunk(2, dim=-1)
        torch.mul(upstream[0], F.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(upstream[0] * up, gate, grad_input=of_gate)
        return gradient
