"""What has to move where for an adapter to be in a slot: worked out once a layout, for all its adapters and all slots.

A **move** fills one tile of a stacked tensor: the slot's part of it gets ``rows`` x ``cols`` numbers of the revision
for each expert, and zeros beside and below them up to ``dst_rows`` x ``dst_cols``. The tiles of a plan are disjoint and
cover every stacked tensor of every wrapped module: what an adapter lacks is a move without a source. So a slot holds
after a write what it would hold after zeroing it and copying, whatever was there before.

Numbers of the revision are rounded to the slot's dtype first (they may be F32 where it is bfloat16). Where a move has a
scale, the rounded number is multiplied by it in fp32 and rounded again: stock vLLM does it in this order, and its bits
are the bar.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class Column(enum.IntEnum):
    """The columns of ``Plan.table``. Strides and offsets count elements, of the destination's or the source's dtype.

    Element (e, r, c) of slot s is at ``DST_PTR + item * (s * DST_SLOT_STRIDE + e * DST_EXPERT_STRIDE
    + r * DST_ROW_STRIDE + c)``, for e < EXPERTS, r < DST_ROWS, c < DST_COLS. Its value, for r < ROWS and c < COLS, is
    element ``SRC_OFFSET + e * SRC_EXPERT_STRIDE + r * SRC_ROW_STRIDE + c`` of the revision's data; zero elsewhere.
    Neighbours in a row are neighbours in memory on both sides.
    """

    DST_PTR = 0  # address in bytes
    DST_SLOT_STRIDE = 1
    DST_EXPERT_STRIDE = 2
    DST_ROW_STRIDE = 3
    EXPERTS = 4
    DST_ROWS = 5
    DST_COLS = 6
    SRC_OFFSET = 7  # -1: no source, the tile is zeroed; ROWS and COLS are 0 then
    SRC_EXPERT_STRIDE = 8  # 0 where all experts share the factor
    SRC_ROW_STRIDE = 9
    ROWS = 10  # at most DST_ROWS
    COLS = 11  # at most DST_COLS
    SCALE_INDEX = 12  # place in the ``scales`` of a write; -1: copied as it is


class Source(NamedTuple):
    """Where a move reads: see Column for each. ``scale`` is -1 or a place in the scales."""

    offset: int
    expert_stride: int
    row_stride: int
    rows: int
    cols: int
    scale: int = -1


class Move(NamedTuple):
    """``tile`` is a view of a stacked tensor, (slots, experts, rows, cols), dense along its last dimension."""

    tile: torch.Tensor
    source: Source | None = None


class Switch(NamedTuple):
    """An int32 tensor with a place a slot, which an engine's kernels look at, and what the adapter's place must say."""

    tensor: torch.Tensor
    value: int


@dataclass(frozen=True, eq=False)
class Plan:
    """The moves of one layout, as objects and as a table of Columns (int64, one row a move).

    ``switches`` are as binding as the moves. ``source_dtype`` and ``dtype`` are of the revision's data (bfloat16 or
    float32) and of all tiles. ``data_bytes`` is how long the data is that the offsets count in.
    """

    moves: tuple[Move, ...]
    switches: tuple[Switch, ...]
    table: npt.NDArray[np.int64]
    source_dtype: torch.dtype
    dtype: torch.dtype
    data_bytes: int

    @classmethod
    def of(
        cls, moves: Sequence[Move], switches: Sequence[Switch], *, source_dtype: torch.dtype, data_bytes: int
    ) -> Plan:
        """Raises RuntimeError for tiles that can't be written, and for a source that reads past the data or does not
        fit its tile: neither is an adapter's fault, which was checked before.
        """
        dtypes = {move.tile.dtype for move in moves}
        if len(dtypes) != 1:
            raise RuntimeError(f"the slots have the dtypes {sorted(map(str, dtypes))}, not one")
        table = np.array([_row(move) for move in moves], np.int64).reshape(-1, len(Column))
        _check(table, data_bytes // source_dtype.itemsize)
        table.flags.writeable = False
        return cls(tuple(moves), tuple(switches), table, source_dtype, dtypes.pop(), data_bytes)


def _row(move: Move) -> tuple[int, ...]:
    tile, source = move
    slot, expert, row, column = tile.stride()
    _, experts, rows, columns = tile.shape
    if column != 1 and columns > 1:
        raise RuntimeError("a tile's rows are not dense")
    offset, *strides_and_sizes = source or Source(-1, 0, 0, 0, 0)
    return (tile.data_ptr(), slot, expert, row, experts, rows, columns, offset, *strides_and_sizes)


def _check(table: npt.NDArray[np.int64], elements: int) -> None:
    offset, rows, columns = (table[:, column] for column in (Column.SRC_OFFSET, Column.ROWS, Column.COLS))
    last = (
        offset
        + (table[:, Column.EXPERTS] - 1) * table[:, Column.SRC_EXPERT_STRIDE]
        + (rows - 1) * table[:, Column.SRC_ROW_STRIDE]
        + columns
    )
    reads = (offset >= 0) & (rows > 0) & (columns > 0)
    if (reads & (last > elements)).any():
        raise RuntimeError(f"a move reads past the {elements} numbers of the revision")
    if ((rows > table[:, Column.DST_ROWS]) | (columns > table[:, Column.DST_COLS])).any():
        raise RuntimeError("a move's source is larger than its tile")
