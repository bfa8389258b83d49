"""The norms on CUDA: one kernel forward and one backward, in place of a dozen. The CPU never imports this."""

from __future__ import annotations

import torch
from liger_kernel.ops.rms_norm import LigerRMSNormFunction

from .model import RMSNorm

# fp32 within, rounded before the weight is applied, as Hugging Face does
_CASTING = "llama"


class FusedRMSNorm(RMSNorm):
    """RMSNorm with Liger's kernels (https://github.com/linkedin/Liger-Kernel)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = LigerRMSNormFunction.apply(x, self.weight, self.eps, 0.0, _CASTING, False)
        return normed
