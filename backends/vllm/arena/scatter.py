"""The kernel that puts a revision's numbers where a plan's table says, and what it is launched with.

The tiles of a plan are cut into **blocks** of BLOCK numbers of the destination, a program each. Sources are read from a
staging buffer that may be smaller than a revision: the moves are grouped into **pieces**, each with the range of the
revision that its moves read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from .plan import Column

# numbers a program: 16 a thread
BLOCK = 2048
WARPS = 4
# switches a program: one size, so that one kernel is compiled
SWITCHES = 128
# a kernel counts the numbers of one move in 32 bits
_MOST_NUMBERS = 2**31 - BLOCK

_COLUMNS = tl.constexpr(len(Column))
_DST_PTR = tl.constexpr(int(Column.DST_PTR))
_DST_SLOT_STRIDE = tl.constexpr(int(Column.DST_SLOT_STRIDE))
_DST_EXPERT_STRIDE = tl.constexpr(int(Column.DST_EXPERT_STRIDE))
_DST_ROW_STRIDE = tl.constexpr(int(Column.DST_ROW_STRIDE))
_EXPERTS = tl.constexpr(int(Column.EXPERTS))
_DST_ROWS = tl.constexpr(int(Column.DST_ROWS))
_DST_COLS = tl.constexpr(int(Column.DST_COLS))
_SRC_OFFSET = tl.constexpr(int(Column.SRC_OFFSET))
_SRC_EXPERT_STRIDE = tl.constexpr(int(Column.SRC_EXPERT_STRIDE))
_SRC_ROW_STRIDE = tl.constexpr(int(Column.SRC_ROW_STRIDE))
_ROWS = tl.constexpr(int(Column.ROWS))
_COLS = tl.constexpr(int(Column.COLS))
_SCALE_INDEX = tl.constexpr(int(Column.SCALE_INDEX))

_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Piece(NamedTuple):
    """Moves whose sources lie in ``start`` to ``end`` (elements of the data), and their blocks.

    ``moves`` (rows of the table) and ``firsts`` (each block's first number within its move) have an entry a block.
    """

    start: int
    end: int
    moves: npt.NDArray[np.int32]
    firsts: npt.NDArray[np.int32]


def cut(table: npt.NDArray[np.int64], most: int) -> list[Piece]:
    """A plan's table in pieces that read at most ``most`` elements each, or one move; what reads nothing is in the
    first. Raises RuntimeError for a move too large for the kernel.
    """
    numbers = table[:, Column.EXPERTS] * table[:, Column.DST_ROWS] * table[:, Column.DST_COLS]
    starts = table[:, Column.SRC_OFFSET]
    spans = (
        (table[:, Column.EXPERTS] - 1) * table[:, Column.SRC_EXPERT_STRIDE]
        + (table[:, Column.ROWS] - 1) * table[:, Column.SRC_ROW_STRIDE]
        + table[:, Column.COLS]
    )
    reads = (starts >= 0) & (table[:, Column.ROWS] > 0) & (table[:, Column.COLS] > 0)
    if (numbers > _MOST_NUMBERS).any() or (reads & (spans > _MOST_NUMBERS)).any():
        raise RuntimeError(f"a move of more than {_MOST_NUMBERS} numbers")
    idle = [int(move) for move in np.flatnonzero(~reads)]
    ordered = [int(move) for move in np.argsort(starts, kind="stable") if reads[move]]
    pieces = []
    for group in _groups(ordered, starts, starts + spans, most):
        start = min((int(starts[move]) for move in group), default=0)
        end = max((int(starts[move] + spans[move]) for move in group), default=0)
        pieces.append(Piece(start, end, *_blocks([*idle, *group], numbers)))
        idle = []
    return pieces


def _groups(
    ordered: list[int], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], most: int
) -> Iterator[list[int]]:
    """Runs of ``ordered`` that span at most ``most``; at least one, which may be empty."""
    group: list[int] = []
    end = 0
    for move in ordered:
        if group and max(end, int(ends[move])) - int(starts[group[0]]) > most:
            yield group
            group, end = [], 0
        group.append(move)
        end = max(end, int(ends[move]))
    yield group


def _blocks(moves: list[int], numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    counts = -(-numbers[moves] // BLOCK)
    owners = np.repeat(np.asarray(moves, np.int32), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return owners, ((np.arange(owners.size) - before) * BLOCK).astype(np.int32)


class Blocks(NamedTuple):
    """A piece's blocks on the device."""

    moves: torch.Tensor
    firsts: torch.Tensor


def scatter(
    table: torch.Tensor, blocks: Blocks, staging: torch.Tensor, start: int, scales: torch.Tensor, slot: int, dtype: Any
) -> None:
    """Launch on the current stream: fill ``slot``'s part of the blocks' tiles, whose dtype is ``dtype``.

    ``table`` is a plan's, int64, on the device; ``staging`` holds the revision's numbers from element ``start`` on, in
    their dtype; ``scales`` is fp32 and not empty.
    """
    count = blocks.moves.numel()
    if count:
        _scatter[(count,)](
            table, blocks.moves, blocks.firsts, staging, start, scales, slot,
            dtype=_TRITON_DTYPES[dtype], item=dtype.itemsize, size=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def set_switches(addresses: torch.Tensor, values: torch.Tensor, slot: int) -> None:
    """Launch on the current stream: ``values`` (int32) into ``slot``'s place of the int32 tensors at ``addresses``."""
    count = addresses.numel()
    if count:
        _set_switches[(triton.cdiv(count, SWITCHES),)](addresses, values, count, slot, size=SWITCHES)


@triton.jit(do_not_specialize=["start", "slot"])  # type: ignore[untyped-decorator]
def _scatter(  # type: ignore[no-untyped-def]
    table, moves, firsts, source, start, scales, slot, dtype: tl.constexpr, item: tl.constexpr, size: tl.constexpr
):
    block = tl.program_id(0)
    row = table + tl.load(moves + block).to(tl.int64) * _COLUMNS
    dst_rows = tl.load(row + _DST_ROWS).to(tl.int32)
    dst_cols = tl.load(row + _DST_COLS).to(tl.int32)
    index = tl.load(firsts + block) + tl.arange(0, size)
    c = index % dst_cols
    r = (index // dst_cols) % dst_rows
    e = index // (dst_cols * dst_rows)
    inside = e < tl.load(row + _EXPERTS).to(tl.int32)

    given = inside & (r < tl.load(row + _ROWS).to(tl.int32)) & (c < tl.load(row + _COLS).to(tl.int32))
    expert_stride = tl.load(row + _SRC_EXPERT_STRIDE).to(tl.int32)
    row_stride = tl.load(row + _SRC_ROW_STRIDE).to(tl.int32)
    begin = tl.load(row + _SRC_OFFSET) - start
    value = tl.load(source + begin + (e * expert_stride + r * row_stride + c), mask=given, other=0.0).to(dtype)
    scale_index = tl.load(row + _SCALE_INDEX)
    if scale_index >= 0:
        value = (value.to(tl.float32) * tl.load(scales + scale_index)).to(dtype)

    base = tl.load(row + _DST_PTR) + tl.cast(slot, tl.int64) * tl.load(row + _DST_SLOT_STRIDE) * item
    destination = base.to(tl.pointer_type(dtype))
    offset = e.to(tl.int64) * tl.load(row + _DST_EXPERT_STRIDE) + r.to(tl.int64) * tl.load(row + _DST_ROW_STRIDE) + c
    tl.store(destination + offset, value, mask=inside)


@triton.jit(do_not_specialize=["count", "slot"])  # type: ignore[untyped-decorator]
def _set_switches(addresses, values, count, slot, size: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * size + tl.arange(0, size)
    there = index < count
    places = tl.load(addresses + index, mask=there, other=0).to(tl.pointer_type(tl.int32)) + slot
    tl.store(places, tl.load(values + index, mask=there, other=0), mask=there)
