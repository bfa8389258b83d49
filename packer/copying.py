"""Moves tensors' bytes by plan: gathered into blocks, checked, hashed and written on the way, in bounded memory.

A plan is a list of byte ranges of the source in the order of the destination; no object exists for a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from packer.scaling import widen
from wire.outcomes import InvalidRequest

BLOCK_BYTES = 4 << 20
DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Sink(Protocol):
    """What takes a file's bytes, in order."""

    def write(self, data: Any, /) -> object: ...


class CopyPlan:
    """Ranges of ``source`` (offsets and lengths in bytes), which follow each other in the destination.

    ``names`` says which tensor each range is, for error messages.
    """

    def __init__(self, source: Bytes, offsets: Sequence[int], lengths: Sequence[int], names: Sequence[str]) -> None:
        self.source = source
        self.offsets = offsets
        self.lengths = lengths
        self.names = names
        self.ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
        self.total = int(self.ends[-1]) if len(lengths) else 0

    def name_at(self, position: int) -> str:
        """The tensor that holds the destination's byte ``position``."""
        return self.names[int(np.searchsorted(self.ends, position, side="right"))]

    def blocks(self) -> Iterator[Bytes]:
        """The destination's bytes, block by block; every block is fresh memory of at most BLOCK_BYTES."""
        block = np.empty(min(BLOCK_BYTES, self.total), dtype=np.uint8)
        filled = 0
        left = self.total
        for offset, length in zip(self.offsets, self.lengths, strict=True):
            done = 0
            while done < length:
                step = min(length - done, block.size - filled)
                block[filled : filled + step] = self.source[offset + done : offset + done + step]
                done += step
                filled += step
                if filled == block.size:
                    left -= filled
                    yield block
                    block = np.empty(min(BLOCK_BYTES, left), dtype=np.uint8)
                    filled = 0


class HashingSink:
    """Passes bytes on to ``out`` and knows the digest and size of all that passed."""

    def __init__(self, out: Sink) -> None:
        self._out = out
        self._hash = blake3(max_threads=blake3.AUTO)
        self.size = 0

    def write(self, data: Any) -> None:
        self._hash.update(data)
        self._out.write(data)
        self.size += len(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def copy(plan: CopyPlan, dtype: str, stored: str, out: Sink, progress: Progress | None = None) -> None:
    """Write the planned tensors of ``dtype`` to ``out`` as ``stored``: the same, or F16 kept as F32 and back.

    The next block is gathered while this one is checked and written. Raises InvalidRequest naming the tensor that
    holds a value that is not finite, or that F16 can't hold.
    """
    blocks = plan.blocks()
    done = 0
    with ThreadPoolExecutor(1, thread_name_prefix="gather") as pool:
        coming = pool.submit(next, blocks, None)
        while (block := coming.result()) is not None:
            coming = pool.submit(next, blocks, None)

            def name_at(position: int, done: int = done) -> str:
                return plan.name_at(done + position)

            values = block.view(DTYPES[dtype])
            check_finite(values, dtype, name_at)
            if stored != dtype:
                values = widen(values, dtype) if stored == "F32" else narrow(values, stored, name_at)
            out.write(values.view(np.uint8).data)
            done += block.size
            if progress is not None:
                progress(done, plan.total)


def narrow(values: npt.NDArray[np.float32], dtype: str, name_at: Callable[[int], str]) -> npt.NDArray[Any]:
    """fp32 ``values`` in the narrower ``dtype`` that they came from. Raises InvalidRequest where one doesn't fit it."""
    with np.errstate(over="ignore", under="ignore"):
        narrowed: npt.NDArray[Any] = values.astype(DTYPES[dtype])
    inexact = narrowed.astype(np.float32) != values
    if inexact.any():
        name = name_at(int(inexact.argmax()) * values.itemsize)
        raise InvalidRequest(
            f"tensor {name} holds a value that {dtype} can't hold, which it says it came in", field=name
        )
    return narrowed


def check_finite(values: npt.NDArray[Any], dtype: str, name_at: Callable[[int], str]) -> None:
    """Raises InvalidRequest if a value (BF16 is given as uint16) is not finite; ``name_at`` names a byte's tensor."""
    if dtype == "BF16":
        # without the sign bit, everything from 0x7F80 on is an infinity or no number
        worst = np.left_shift(values, np.uint16(1))
        if not worst.size or int(worst.max()) < 0xFF00:
            return
        bad = worst >= np.uint16(0xFF00)
    else:
        bad = ~np.isfinite(values)
        if not bad.any():
            return
    name = name_at(int(bad.argmax()) * values.itemsize)
    raise InvalidRequest(f"tensor {name} holds a value that is not finite (NaN or infinite)", field=name)
