"""A slot's bytes on CPU: copied in place, done at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from .plan import Move, Plan


class Done:
    """A write that was over when it returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class CpuWriter:
    """See ``writer.SlotWriter``. The engine computes on the thread that calls, so nothing of the slot is in use."""

    def mapped(self, segment: memoryview) -> None:
        return

    def unmapped(self, segment: memoryview, close: Callable[[], None]) -> None:
        close()

    def write(self, plan: Plan, data: memoryview, slot: int, scales: npt.NDArray[np.float32]) -> Done:
        source = _numbers(data, plan.source_dtype)
        with torch.inference_mode():
            for move in plan.moves:
                _write(move, source, slot, scales)
            for tensor, value in plan.switches:
                tensor[slot] = value
        return Done()


def _numbers(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():
        # torch has no read-only tensors; nobody writes to this one
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=dtype)


def _write(move: Move, numbers: torch.Tensor, slot: int, scales: npt.NDArray[np.float32]) -> None:
    tile, source = move
    there = tile[slot]
    experts, rows, columns = there.shape
    if source is None:
        there.zero_()
        return
    if (source.rows, source.cols) != (rows, columns):
        there.zero_()
        there = there[:, : source.rows, : source.cols]
    size, strides = (experts, source.rows, source.cols), (source.expert_stride, source.row_stride, 1)
    values = numbers.as_strided(size, strides, source.offset)
    if source.scale < 0:
        there.copy_(values)
    else:
        torch.mul(values.to(tile.dtype), float(scales[source.scale]), out=there)
