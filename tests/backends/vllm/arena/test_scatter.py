"""The kernel, run by Triton's interpreter without a GPU; its own rounding to bfloat16 is of CUDA alone."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from backends.vllm.arena.plan import Column, Move, Plan, Source, Switch  # noqa: E402

SLOTS, OLD = 3, 7.0
# exact in bfloat16 whatever it multiplies
SCALES = np.array([0.5, 2.0, -4.0], np.float32)


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    """``scatter`` with its kernels interpreted, which Triton decides when they are defined."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from backends.vllm.arena import scatter

        yield importlib.reload(scatter)
    finally:
        os.environ.pop("TRITON_INTERPRET") if before is None else os.environ.update(TRITON_INTERPRET=before)
        importlib.reload(scatter)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, torch.Tensor]:
    dtype, source_dtype = draw(st.sampled_from([(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)]))
    moves, at = [], 0
    for _ in range(draw(st.integers(1, 4))):
        experts, rows, cols = (draw(st.integers(1, most)) for most in (5, 70, 70))
        tile = torch.full((SLOTS, experts, rows, cols + draw(st.integers(0, 3))), OLD, dtype=dtype)[..., :cols]
        if draw(st.booleans()):
            tile = tile[:, :, :: draw(st.integers(1, 2))]
        taken_rows, taken_cols = draw(st.integers(0, tile.shape[2])), draw(st.integers(0, cols))
        if draw(st.integers(0, 4)) == 0 or not taken_rows * taken_cols:
            moves.append(Move(tile))
            continue
        row_stride = taken_cols + draw(st.integers(0, 5))
        expert_stride = draw(st.sampled_from([0, taken_rows * row_stride]))
        scale = draw(st.integers(-1, len(SCALES) - 1))
        moves.append(Move(tile, Source(at, expert_stride, row_stride, taken_rows, taken_cols, scale)))
        at += max(1, experts if expert_stride else 1) * taken_rows * row_stride
    data = torch.randn(at + 1, generator=torch.Generator().manual_seed(at)).to(source_dtype)
    size = data.numel() * data.element_size()
    return Plan.of(moves, [], source_dtype=source_dtype, data_bytes=size), data


def fill(kernel: ModuleType, plan: Plan, data: torch.Tensor, slot: int, most: int) -> int:
    """Do what a writer does, with the host's memory for the device's. Returns the number of pieces."""
    pieces = kernel.cut(plan.table, most)
    table = torch.from_numpy(plan.table.copy())
    for piece in pieces:
        blocks = kernel.Blocks(torch.from_numpy(piece.moves), torch.from_numpy(piece.firsts))
        staging = data[piece.start : piece.end].clone()
        scales = torch.from_numpy(SCALES)
        kernel.scatter(table, blocks, staging, piece.start, scales, slot, plan.dtype)
    return len(pieces)


def expected(move: Move, data: torch.Tensor, slot: int) -> torch.Tensor:
    _, experts, rows, cols = move.tile.shape
    full = torch.zeros(experts, rows, cols, dtype=move.tile.dtype)
    if move.source is not None:
        source = move.source
        strides = (source.expert_stride, source.row_stride, 1)
        values = torch.as_strided(data, (experts, source.rows, source.cols), strides, source.offset).to(full.dtype)
        if source.scale >= 0:
            values = (values.float() * SCALES[source.scale].item()).to(full.dtype)
        full[:, : source.rows, : source.cols] = values
    return full


@settings(max_examples=40, deadline=None)
@given(plan=plans(), slot=st.integers(0, SLOTS - 1), most=st.sampled_from([10**9, 600, 1]))
def test_a_slot_holds_the_source_and_zeros_and_others_what_they_held(
    kernel: ModuleType, plan: tuple[Plan, torch.Tensor], slot: int, most: int
) -> None:
    fill(kernel, *plan, slot, most)
    for move in plan[0].moves:
        assert torch.equal(move.tile[slot], expected(move, plan[1], slot))
        others = [other for other in range(SLOTS) if other != slot]
        assert bool((move.tile[others] == OLD).all())


def test_fp32_is_multiplied_as_it_is(kernel: ModuleType) -> None:
    tile = torch.full((1, 1, 1, 1000), OLD)
    data = torch.randn(1000)
    plan = Plan.of([Move(tile, Source(0, 0, 1000, 1, 1000, 0))], [], source_dtype=torch.float32, data_bytes=4000)
    table, scales = torch.from_numpy(plan.table.copy()), torch.tensor([1 / 3])
    [piece] = kernel.cut(plan.table, 1 << 20)
    blocks = kernel.Blocks(torch.from_numpy(piece.moves), torch.from_numpy(piece.firsts))
    kernel.scatter(table, blocks, data, 0, scales, 0, torch.float32)
    assert torch.equal(tile[0, 0, 0], data * scales)


def test_switches_are_set_in_the_slots_place_alone(kernel: ModuleType) -> None:
    tensors = [torch.full((SLOTS,), 9, dtype=torch.int32) for _ in range(5)]
    switches = [Switch(tensor, number % 2) for number, tensor in enumerate(tensors)]
    addresses = torch.tensor([one.tensor.data_ptr() for one in switches])
    kernel.set_switches(addresses, torch.tensor([one.value for one in switches], dtype=torch.int32), 1)
    assert [tensor.tolist() for tensor in tensors] == [[9, number % 2, 9] for number in range(5)]


def test_pieces_read_no_more_than_they_may(kernel: ModuleType) -> None:
    tiles = [torch.zeros(1, 1, 1, 100) for _ in range(6)]
    moves = [Move(tile, Source(100 * at, 0, 100, 1, 100)) for tile, at in zip(tiles, (3, 0, 1, 5, 2, 4), strict=True)]
    plan = Plan.of(moves, [], source_dtype=torch.float32, data_bytes=2400)
    pieces = kernel.cut(plan.table, 250)
    assert [(piece.start, piece.end) for piece in pieces] == [(0, 200), (200, 400), (400, 600)]
    assert sorted(move for piece in pieces for move in piece.moves) == list(range(6))


def test_a_move_too_large_to_count_is_refused(kernel: ModuleType) -> None:
    table = np.zeros((1, len(Column)), np.int64)
    table[0, [Column.EXPERTS, Column.DST_ROWS, Column.DST_COLS]] = 1 << 11, 1 << 11, 1 << 10
    with pytest.raises(RuntimeError, match="more than"):
        kernel.cut(table, 1 << 30)
