"""By how much an adapter's product counts, and folding that into its B factor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt


def scale(alpha: float, rank: int, *, rslora: bool) -> float:
    """The factor of B @ A: alpha / r (arXiv 2106.09685), with rsLoRA alpha / sqrt(r) (arXiv 2312.03732)."""
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def fold(factor: npt.NDArray[np.float32], by: float) -> npt.NDArray[np.float32]:
    """``factor`` times ``by`` in fp32: what an engine computes before it rounds to its own dtype."""
    return factor * np.float32(by)


def widen(raw: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """The values of BF16 (given as uint16), F16 or F32 ``raw`` in fp32, exactly."""
    if dtype == "BF16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(np.float32)


def round_as(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.float32]:
    """``values`` rounded to what ``dtype`` (an engine's: bfloat16, float16, float32) can hold, ties to even."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (rounded & np.uint32(0xFFFF0000)).view(np.float32)
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    return values
