"""Writes to slots of a real CUDA device, from a mapping that is pinned and from memory that is not."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from backends.vllm.arena.cuda import BOUNCE_BYTES, CudaWriter  # noqa: E402
from backends.vllm.arena.plan import Move, Plan, Source, Switch  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

OLD = 7.0
SCALES = np.array([1 / 3, 0.7], np.float32)
SIZE = 64 << 20


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[memoryview]:
    """Random finite bfloat16 in a file that is mapped shared and read-only."""
    path = tmp_path / "segment"
    numbers = np.random.default_rng(0).standard_normal(SIZE // 2, np.float32).view(np.uint32) >> 16
    path.write_bytes(numbers.astype(np.uint16).tobytes())
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    yield memoryview(mapping)


def make_plan(experts: int = 40) -> Plan:
    """A and B of a stack of experts in slots of a larger rank, a module without a source, and a switch."""
    shapes = ((experts, 8, 2048), (experts, 768, 8), (1, 8, 64))
    a, b, none = (torch.full((3, *shape), OLD, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    moves = [
        Move(a, Source(0, 3 * 2048, 2048, 3, 2048)),
        Move(b, Source(experts * 3 * 2048, 768 * 3, 3, 768, 3, 1)),
        Move(none),
    ]
    switch = torch.zeros(3, dtype=torch.int32, device="cuda")
    size = experts * 3 * (2048 + 768)
    return Plan.of(moves, [Switch(switch, 1)], source_dtype=torch.bfloat16, data_bytes=2 * size)


def check(plan: Plan, data: memoryview, slot: int) -> None:
    values = torch.frombuffer(bytearray(data[: plan.data_bytes]), dtype=torch.bfloat16)
    for tile, source in plan.moves:
        expected = torch.zeros(tile.shape[1:], dtype=torch.bfloat16)
        if source is not None:
            shape = (tile.shape[1], source.rows, source.cols)
            given = torch.as_strided(values, shape, (source.expert_stride, source.row_stride, 1), source.offset).clone()
            if source.scale >= 0:
                given *= SCALES[source.scale].item()
            expected[:, : source.rows, : source.cols] = given
        assert torch.equal(tile[slot].cpu(), expected)
        others = [other for other in range(3) if other != slot]
        assert bool((tile[others] == OLD).all())
    [switch] = plan.switches
    assert switch.tensor.tolist() == [int(place == slot) for place in range(3)]


@pytest.mark.parametrize("staging", [128 << 20, 1 << 20])
def test_a_write_from_pinned_memory(segment: memoryview, staging: int) -> None:
    writer = CudaWriter(torch.device("cuda"), dtype=torch.bfloat16, staging_bytes=staging)
    writer.mapped(segment)
    writer.wait_until_pinned()
    plan = make_plan()
    writer.write(plan, segment[4096 : 4096 + plan.data_bytes], 1, SCALES).wait()
    check(plan, segment[4096:], 1)
    closed = threading.Event()
    writer.unmapped(segment, closed.set)
    assert closed.wait(30)


def test_a_write_from_memory_that_is_not_pinned(segment: memoryview) -> None:
    writer = CudaWriter(torch.device("cuda"), dtype=torch.bfloat16)
    plan = make_plan(experts=1200)
    assert plan.data_bytes > BOUNCE_BYTES
    pending = writer.write(plan, segment[: plan.data_bytes], 2, SCALES)
    while not pending.done():
        pass
    check(plan, segment, 2)


def test_writes_that_follow_at_once_do_not_mix(segment: memoryview) -> None:
    writer = CudaWriter(torch.device("cuda"), dtype=torch.bfloat16)
    plans = [make_plan(experts=1200), make_plan(experts=1200)]
    size = plans[0].data_bytes
    pending = [
        writer.write(plan, segment[at : at + size], 0, SCALES) for plan, at in zip(plans, (0, 4096), strict=True)
    ]
    for one in pending:
        one.wait()
    check(plans[0], segment, 0)
    check(plans[1], segment[4096:], 0)


def test_scaling_rounds_as_the_host_does_for_every_bfloat16(segment: memoryview) -> None:
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[torch.isfinite(values)]
    tile = torch.zeros(1, 1, 1, values.numel(), dtype=torch.bfloat16, device="cuda")
    source = Source(0, 0, values.numel(), 1, values.numel(), 0)
    plan = Plan.of([Move(tile, source)], [], source_dtype=torch.bfloat16, data_bytes=2 * values.numel())
    writer = CudaWriter(torch.device("cuda"), dtype=torch.bfloat16)
    writer.write(plan, memoryview(values.view(torch.int16).numpy()).cast("B"), 0, SCALES).wait()
    values *= SCALES[0].item()
    assert torch.equal(_bits(tile.cpu()), _bits(values))


def test_a_slot_is_left_alone_until_queued_work_on_it_is_done(segment: memoryview) -> None:
    writer = CudaWriter(torch.device("cuda"), dtype=torch.bfloat16)
    plan = make_plan()
    tile = plan.moves[0].tile
    torch.cuda._sleep(200_000_000)
    before = tile[1].clone()
    writer.write(plan, segment[: plan.data_bytes], 1, SCALES).wait()
    assert bool((before == OLD).all())
    check(plan, segment, 1)


def _bits(values: Tensor) -> Tensor:
    return values.flatten().view(torch.int16)
