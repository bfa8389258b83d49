"""Whether all of a tensor's values are numbers, in one pass over it."""

from __future__ import annotations

import torch


def is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """A truth value on the tensor's device. Extremes tell it: they are NaN where any value is."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.isfinite(torch.stack(torch.aminmax(tensor))).all()
