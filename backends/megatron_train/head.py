"""The head: hidden states to -log p of the targets, without holding all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.parallel_state import get_tensor_model_parallel_world_size
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

# a bound for the logits of one pass over the head, which may be in fp32
HEAD_BYTES = 256 << 20


def score(rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(n, hidden) -> -log p of the targets (n,) in fp32; ``weight`` has this tensor rank's part of the vocabulary.

    The head is run over so many rows at a time that their logits stay within ``HEAD_BYTES``. It is frozen, and each
    target's gradient is the same but for a factor: it is made at once, while the logits are there, so that the
    backward pass needs neither them nor the head again.
    """
    step = max(1, HEAD_BYTES // (4 * len(weight)))
    nll: torch.Tensor = _Score.apply(rows, weight, targets, step)  # type: ignore[no-untyped-call]
    return nll


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, step: int) -> torch.Tensor:
        wanted = ctx.needs_input_grad[0]
        scored = _scored_on_cuda if rows.is_cuda and get_tensor_model_parallel_world_size() == 1 else _scored
        parts = [
            scored(some, weight, expected, wanted)
            for some, expected in zip(torch.split(rows, step), torch.split(targets, step), strict=True)
        ]
        if wanted:
            ctx.save_for_backward(torch.cat([gradient for _, gradient in parts if gradient is not None]))
        return torch.cat([nll for nll, _ in parts])

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradients,) = ctx.saved_tensors
        return (gradients * upstream[0].unsqueeze(1)).to(gradients.dtype), None, None, None


def _scored(
    rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, wanted: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """-log p of the targets and, where it is wanted, the gradient of their sum for ``rows``."""
    with torch.set_grad_enabled(wanted):
        leaf = rows.detach().requires_grad_(wanted)
        nll = vocab_parallel_cross_entropy(F.linear(leaf, weight).unsqueeze(1), targets.unsqueeze(1)).squeeze(1)
        (gradient,) = torch.autograd.grad(nll.sum(), leaf) if wanted else (None,)
    return nll.detach(), gradient


def _scored_on_cuda(
    rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, wanted: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same, of a head that is whole on its rank."""
    from . import cuda_kernels

    logits = F.linear(rows, weight)
    nll = cuda_kernels.score(logits, targets, gradient=wanted)
    # by now the logits' gradient
    return nll, logits @ weight if wanted else None
