"""What a layer computes between its linears, against the same in plain operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from backends.megatron_train.gated import gated
from backends.megatron_train.rotary import rotate


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


def _check(ours: torch.Tensor, plain: torch.Tensor, leaf: torch.Tensor) -> None:
    torch.testing.assert_close(ours, plain)
    upstream = torch.randn_like(plain)
    (found,) = torch.autograd.grad(ours, leaf, upstream)
    (expected,) = torch.autograd.grad(plain, leaf, upstream)
    torch.testing.assert_close(found, expected)


def test_the_gated_activation_and_its_gradient() -> None:
    both = _drawn(5, 2, 14)
    gate, up = both.chunk(2, dim=-1)
    _check(gated(both), F.silu(gate) * up, both)


def test_heads_are_turned_by_their_positions_and_back() -> None:
    # a view into the output of a linear, as Megatron cuts it
    outputs = _drawn(5, 2, 3, 12)
    heads = outputs[..., 4:]
    half = torch.arange(5, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    angles = torch.cat((half, half), dim=-1)[:, None, None]
    first, second = heads.chunk(2, dim=-1)
    plain = heads * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
    _check(rotate(heads, angles), plain, outputs)
