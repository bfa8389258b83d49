"""The passes over memory that a layer makes between its linears, in operations that run on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def gate(both: torch.Tensor) -> torch.Tensor:
    opened, up = both.chunk(2, dim=-1)
    return F.silu(opened).mul_(up)


def gate_gradient(upstream: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    opened, up = both.chunk(2, dim=-1)
    gradient = torch.empty_like(both)
    of_gate, of_up = gradient.chunk(2, dim=-1)
    torch.mul(upstream, F.silu(opened), out=of_up)
    torch.ops.aten.silu_backward.grad_input(upstream * up, opened, grad_input=of_gate)
    return gradient


def turn(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
    first, second = heads.chunk(2, dim=-1)
    left, right = turned.chunk(2, dim=-1)
    torch.mul(first, cosines, out=left).addcmul_(second, sines, value=-1)
    torch.mul(second, cosines, out=right).addcmul_(first, sines)
    return turned
