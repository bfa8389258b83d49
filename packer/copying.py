"""Moves tensors' bytes by plan: gathered into blocks, checked, hashed and written on the way, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from packer.plan import Bytes, CopyPlan
from packer.scaling import widen
from wire.outcomes import InvalidRequest

BLOCK_BYTES = 1 << 20
_WORKERS = 2
_BLOCKS_AHEAD = 4
DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}

# the bits of an infinity
_INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Sink(Protocol):
    """What takes a file's bytes, in order."""

    def write(self, data: Any, /) -> object: ...


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

    The next blocks are gathered and checked while this one is written; ``out`` must not keep what it is given. Raises
    InvalidRequest naming the tensor that holds a value that is not finite, or that F16 can't hold.
    """
    done = 0
    for block, values in _gathered(plan, dtype, stored):
        out.write(values.view(np.uint8).data)
        done += block.size
        if progress is not None:
            progress(done, plan.total)


def _gathered(plan: CopyPlan, dtype: str, stored: str) -> Iterator[tuple[Bytes, npt.NDArray[Any]]]:
    """The plan's blocks in order, with their values as ``stored``. A block's memory is used again once it was taken."""
    grain = np.lcm(plan.grain, 4)
    size = BLOCK_BYTES // int(grain) * int(grain) or BLOCK_BYTES
    starts = iter(range(0, plan.total, size))
    free = [np.empty(min(size, plan.total), np.uint8) for _ in range(min(_BLOCKS_AHEAD + 1, -(-plan.total // size)))]
    coming: deque[Future[tuple[Bytes, npt.NDArray[Any]]]] = deque()

    def gather(start: int, block: Bytes) -> tuple[Bytes, npt.NDArray[Any]]:
        block = block[: plan.total - start]
        plan.fill(start, block)
        return block, _checked(block, dtype, stored, lambda position: plan.name_at(start + position))

    if len(free) == 1:
        yield gather(0, free[0])
        return
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="gather") as pool:
        while True:
            while free and (start := next(starts, None)) is not None:
                coming.append(pool.submit(gather, start, free.pop()))
            if not coming:
                return
            block, values = coming.popleft().result()
            yield block, values
            free.append(block if block.base is None else block.base)


def _checked(block: Bytes, dtype: str, stored: str, name_at: Callable[[int], str]) -> npt.NDArray[Any]:
    """The block's values as ``stored``, all of them finite."""
    values = block.view(DTYPES[dtype])
    check_finite(values, dtype, name_at)
    if stored == dtype:
        return values
    return widen(values, dtype) if stored == "F32" else narrow(values, stored, name_at)


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
    item = values.itemsize
    # as integers, infinities and what is no number are the largest, of the positive as of the negative ones
    infinity = _INFINITY[dtype]
    signed, unsigned = values.view(f"<i{item}"), values.view(f"<u{item}")
    negative = infinity | 1 << 8 * item - 1
    if not values.size or (int(signed.max()) < infinity and int(unsigned.max()) < negative):
        return
    bad = (signed >= infinity) | (unsigned >= negative)
    name = name_at(int(bad.argmax()) * values.itemsize)
    raise InvalidRequest(f"tensor {name} holds a value that is not finite (NaN or infinite)", field=name)
