"""AdamW on a policy's flat buffers, and the norm of its gradients over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from wire.outcomes import InvalidRequest
from wire.trainer import Adam

# elements that are stepped at a time: what a step needs beyond the policy's own memory
_CHUNK = 1 << 22
# of what multiplies a step: no fp32 number overflows by it alone
_MOST = 1e6


def check_adam(adam: Adam) -> None:
    """Raises InvalidRequest that names the field."""
    bounds = {
        "learning_rate": (0.0, _MOST), "beta1": (0.0, 1.0), "beta2": (0.0, 1.0), "weight_decay": (0.0, _MOST),
        "grad_clip_norm": (0.0, math.inf),
    }  # fmt: skip
    for name, (least, below) in bounds.items():
        value = getattr(adam, name)
        if not least <= value < below:
            raise InvalidRequest(f"{name} is {value}, not within {least:g} to {below:g}", field=name)
    if not 0.0 < adam.eps < math.inf:
        raise InvalidRequest(f"eps is {adam.eps}, not above 0", field="eps")


def gradient_norm(owned: Sequence[torch.Tensor], device: torch.device, group: Any) -> float:
    """The L2 norm over all ranks' ``owned`` gradients, each of which one rank counts."""
    norms = list(torch._foreach_norm(list(owned))) if owned else []
    squares = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
    squares = squares.to(device)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(squares, group=group)
    return math.sqrt(squares.item())


def step_adam(
    parameters: torch.Tensor, gradients: torch.Tensor, moments: tuple[torch.Tensor, torch.Tensor], step: int,
    adam: Adam, norm: float,
) -> None:  # fmt: skip
    """One step in place, ``step`` counting from 1; all tensors flat, fp32 and of one size. Uses ``gradients`` up."""
    clip = min(1.0, adam.grad_clip_norm / (norm + 1e-6)) if adam.grad_clip_norm > 0 else 1.0
    corrected = adam.learning_rate / (1 - adam.beta1**step)
    root = math.sqrt(1 - adam.beta2**step)
    for start in range(0, parameters.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        values, gradient, first, second = parameters[part], gradients[part], moments[0][part], moments[1][part]
        if clip != 1.0:
            gradient.mul_(clip)
        if adam.weight_decay:
            values.mul_(1 - adam.learning_rate * adam.weight_decay)
        first.lerp_(gradient, 1 - adam.beta1)
        second.mul_(adam.beta2).addcmul_(gradient, gradient, value=1 - adam.beta2)
        values.addcdiv_(first, second.sqrt().div_(root).add_(adam.eps), value=-corrected)
