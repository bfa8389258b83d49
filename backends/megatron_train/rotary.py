"""Rotary position embeddings (arXiv 2104.09864), in fewer passes over the heads than Megatron's own."""

from __future__ import annotations

from typing import Any

import torch

from .kernels import kernels_of


def rotate(heads: torch.Tensor, angles: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """``heads`` (s, b, heads, d) turned by ``angles`` (s, 1, 1, d), whose halves are alike, as Megatron makes them.

    The signature is that of the fused kernel that Megatron asks for.
    """
    assert not interleaved, "pairs lie half a head apart in every base that is read"
    half = angles[..., : angles.shape[-1] // 2]
    turned: torch.Tensor = _Rotate.apply(  # type: ignore[no-untyped-call]
        heads, torch.cos(half).to(heads.dtype), torch.sin(half).to(heads.dtype)
    )
    return turned


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosines, sines)
        return kernels_of(heads).turn(heads, cosines, sines)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return kernels_of(upstream[0]).turn(upstream[0], cosines, -sines), None, None
