"""The head: hidden states to -log p of the targets, without holding all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

# what the logits of one pass over the head may take, in fp32
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
        parts = []
        gradients: list[torch.Tensor] = []
        with torch.set_grad_enabled(wanted):
            for some, expected in zip(torch.split(rows, step), torch.split(targets, step), strict=True):
                leaf = some.detach().requires_grad_(wanted)
                nll = _nll(leaf, weight, expected)
                parts.append(nll.detach())
                if wanted:
                    gradients += torch.autograd.grad(nll.sum(), leaf)
        if wanted:
            ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradients,) = ctx.saved_tensors
        return (gradients * upstream[0].unsqueeze(1)).to(gradients.dtype), None, None, None


def _nll(rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    nll: torch.Tensor = vocab_parallel_cross_entropy(F.linear(rows, weight).unsqueeze(1), targets.unsqueeze(1))
    return nll.squeeze(1)
