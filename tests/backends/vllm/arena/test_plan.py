"""Plans: every number of an adapter where stock vLLM puts it, zeros everywhere else, whatever the slot held before.

The reference below slices and pads whole matrices as stock's ``set_lora`` does, expert by expert.
"""

from __future__ import annotations

import ctypes
import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.arena.header import Headers, Revision, copy_header
from backends.vllm.arena.adaptable import Adaptable
from backends.vllm.arena.cpu import CpuWriter
from backends.vllm.arena.modules import Experts, Linear
from backends.vllm.arena.plan import Column, Move, Plan, Source
from packer.modules import Place
from packer.peft import pack_peft
from packer.revision import RevisionFile
from packer.shape import BaseShape
from tests.packer import moe
from tests.packer.adapters import Tensors
from wire.outcomes import InvalidRequest, Unfit

SLOTS, SLOT, MAX_RANK = 3, 1, 8
HIDDEN, INNER, EXPERTS = 16, 12, 4
BASE = moe.base("Qwen3-MoE", num_hidden_layers=2, mlp_only_layers=[])
PARAMETERS = {
    "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    "peft_version": "0.21.2",
}  # fmt: skip


def stack(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Slots full of what an earlier adapter left."""
    return torch.full((SLOTS, *shape), 7.0, dtype=dtype)


def packed(tensors: Tensors, folder: Path, shape: BaseShape = BASE, **settings: Any) -> bytes:
    rank = next(tensor.shape[0] for name, tensor in tensors.items() if "self_attn" in name and "lora_A" in name)
    leaves = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}
    moe.folder_of(folder, tensors, moe.config(rank, **{"target_modules": sorted(leaves), **settings}))
    out = io.BytesIO()
    pack_peft(folder, shape, out)
    return out.getvalue()


def read(data: bytes, headers: Headers | None = None) -> Revision:
    return (headers or Headers()).read(copy_header(memoryview(data)), len(data))


class Worker:
    """One of ``tp`` x ``ep`` workers' stacks for the first two layers' query, output and experts."""

    def __init__(
        self, *, tp: int = 1, tp_rank: int = 0, ep: int = 1, ep_rank: int = 0, fused: bool = False,
        interleaved: bool = False, sharded: bool = False, dtype: torch.dtype = torch.bfloat16, shape: BaseShape = BASE,
    ) -> None:  # fmt: skip
        self.tp, self.tp_rank, self.ep_rank, self.fused, self.interleaved = tp, tp_rank, ep_rank, fused, interleaved
        self.sharded, self.dtype = sharded, dtype
        self.local, inner, ranks = EXPERTS // ep, INNER // tp, MAX_RANK // (tp if sharded else 1)
        queries = shape.modules[0]["q"].outputs
        self.enabled = torch.zeros(SLOTS + 1, dtype=torch.int32)
        self.rest = stack(1, 5, MAX_RANK, dtype=dtype)
        self.linears: dict[Place, Linear] = {}
        self.experts: dict[int, Experts] = {}
        for layer in range(2):
            self.linears[Place(layer, "q")] = Linear(
                stack(1, ranks, HIDDEN, dtype=dtype), stack(1, queries // tp, MAX_RANK, dtype=dtype),
                a_row=tp_rank * ranks if sharded else 0, b_row=tp_rank * (queries // tp), whole=tp == 1,
            )  # fmt: skip
            self.linears[Place(layer, "o")] = Linear(
                stack(1, MAX_RANK, queries // tp, dtype=dtype), stack(1, HIDDEN, MAX_RANK, dtype=dtype),
                a_column=tp_rank * (queries // tp), whole=tp == 1,
            )  # fmt: skip
            halves, outputs = (1, 2 * inner) if fused else (2, inner)
            self.experts[layer] = Experts(
                gate_up_a=tuple(stack(self.local, MAX_RANK, HIDDEN, dtype=dtype) for _ in range(halves)),
                gate_up_b=tuple(stack(self.local, outputs, MAX_RANK, dtype=dtype) for _ in range(halves)),
                down_a=stack(self.local, MAX_RANK, inner, dtype=dtype),
                down_b=stack(self.local, HIDDEN, MAX_RANK, dtype=dtype),
                enabled=self.enabled, first=ep_rank * self.local, tp_rank=tp_rank, whole=tp == 1,
                interleaved=interleaved,
            )  # fmt: skip
        self.adaptable = Adaptable(shape, self.linears, self.experts, [self.rest], max_rank=MAX_RANK)

    def stacks(self) -> list[torch.Tensor]:
        found = [self.rest]
        for linear in self.linears.values():
            found += [linear.a, linear.b]
        for experts in self.experts.values():
            found += [*experts.gate_up_a, *experts.gate_up_b, experts.down_a, experts.down_b]
        return found

    def expected(self, data: bytes) -> list[torch.Tensor]:
        """What each of ``stacks`` must hold of the adapter in its slot."""
        file = RevisionFile(data)
        pairs = {pair.place: pair for pair in file.pairs}

        def factor(place: Place, which: str) -> torch.Tensor | None:
            """(experts, rows, columns) in the slots' dtype, scaled as stock does."""
            if place not in pairs:
                return None
            dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[file.dtype]
            numbers = torch.frombuffer(bytearray(file.tensor(f"{place}.{which}")), dtype=dtype).to(self.dtype)
            pair = pairs[place]
            stored = numbers.reshape(pair.shapes["AB".index(which)])
            stored = stored if place.expert else stored[None]
            if which == "B":
                stored = stored.clone()
                stored *= file.scale(pair)
            return stored.expand(EXPERTS, -1, -1) if place.expert else stored

        tp, rank, inner = self.tp, self.tp_rank, INNER // self.tp
        mine = slice(self.ep_rank * self.local, (self.ep_rank + 1) * self.local)
        found = [torch.zeros_like(self.rest[SLOT])]
        for place, linear in self.linears.items():
            a, b = factor(place, "A"), factor(place, "B")
            if place.module == "q":
                a = a[:, rank * linear.a.shape[2] :][:, : linear.a.shape[2]] if a is not None and self.sharded else a
                b = b.chunk(tp, 1)[rank] if b is not None else None
            else:
                a = a.chunk(tp, 2)[rank] if a is not None else None
            found += [_padded(a, linear.a), _padded(b, linear.b)]
        for layer, experts in self.experts.items():
            gate, up, both, down = (
                (factor(Place(layer, f"experts.{name}"), "A"), factor(Place(layer, f"experts.{name}"), "B"))
                for name in ("gate", "up", "gate_up", "down")
            )
            if both[0] is not None and both[1] is not None:
                halves = (both[1][:, ::2], both[1][:, 1::2]) if self.interleaved else both[1].chunk(2, 1)
                gate, up = (both[0], halves[0]), (both[0], halves[1])
            parts = [
                (a, b.chunk(tp, 1)[rank]) if a is not None and b is not None else (None, None) for a, b in (gate, up)
            ]
            if self.fused:
                found += _fused(parts, experts, mine, shared=both[0] is not None, interleaved=self.interleaved)
            else:
                found += [_padded(_of(a, mine), stack) for (a, _), stack in zip(parts, experts.gate_up_a, strict=True)]
                found += [_padded(_of(b, mine), stack) for (_, b), stack in zip(parts, experts.gate_up_b, strict=True)]
            a = down[0].chunk(tp, 2)[rank] if down[0] is not None else None
            assert inner == experts.inner
            found += [_padded(_of(a, mine), experts.down_a), _padded(_of(down[1], mine), experts.down_b)]
        return found


def _of(factor: torch.Tensor | None, experts: slice) -> torch.Tensor | None:
    return factor[experts] if factor is not None else None


def _padded(factor: torch.Tensor | None, stack: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros_like(stack[SLOT])
    if factor is not None:
        whole[:, : factor.shape[1], : factor.shape[2]] = factor
    return whole


def _fused(
    parts: list[tuple[torch.Tensor | None, torch.Tensor | None]], experts: Experts, mine: slice, *, shared: bool,
    interleaved: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """Gate's and up's parts in one stack: of one A, or one A above the other with zeros in each other's columns."""
    a, b = (torch.zeros_like(stack[0][SLOT]) for stack in (experts.gate_up_a, experts.gate_up_b))
    column = 0
    for half, (first, second) in enumerate(parts):
        if first is None or second is None:
            continue
        rank = first.shape[1]
        a[:, column : column + rank] = first[mine]
        rows = b[:, half::2] if interleaved else b.chunk(2, 1)[half]
        rows[:, :, column : column + rank] = second[mine]
        column += 0 if shared else rank
    return [a, b]


def interpreted(plan: Plan, data: memoryview, slot: int, scales: npt.NDArray[np.float32]) -> None:
    """Do what ``Column`` says, number by number: what a kernel is given must be all that it needs."""
    numbers = torch.frombuffer(bytearray(data), dtype=plan.source_dtype)
    item = plan.dtype.itemsize
    for row in plan.table.tolist():
        of = dict(zip(Column, row, strict=True))
        for expert in range(of[Column.EXPERTS]):
            for r in range(of[Column.DST_ROWS]):
                values = torch.zeros(of[Column.DST_COLS], dtype=plan.dtype)
                if of[Column.SRC_OFFSET] >= 0 and r < of[Column.ROWS]:
                    at = of[Column.SRC_OFFSET] + expert * of[Column.SRC_EXPERT_STRIDE] + r * of[Column.SRC_ROW_STRIDE]
                    read = numbers[at : at + of[Column.COLS]].to(plan.dtype)
                    if of[Column.SCALE_INDEX] >= 0:
                        read = (read.float() * float(scales[of[Column.SCALE_INDEX]])).to(plan.dtype)
                    values[: of[Column.COLS]] = read
                there = of[Column.DST_PTR] + item * (
                    slot * of[Column.DST_SLOT_STRIDE] + expert * of[Column.DST_EXPERT_STRIDE]
                    + r * of[Column.DST_ROW_STRIDE]
                )  # fmt: skip
                ctypes.memmove(there, values.data_ptr(), values.nbytes)


def check(worker: Worker, data: bytes) -> None:
    """Writing by moves, and by the table, both make of dirty slots what the reference says, and touch no other."""
    revision = read(data)
    plan = worker.adaptable.plan(revision.layout)
    numbers = memoryview(data)[revision.data_start :]
    expected = worker.expected(data)
    for write in (interpreted, CpuWriter().write):
        for stack in worker.stacks():
            stack.fill_(7.0)
        write(plan, numbers, SLOT, revision.scales)
        for stack, wanted in zip(worker.stacks(), expected, strict=True):
            assert torch.equal(stack[SLOT], wanted)
            assert (stack[[0, 2]] == 7.0).all()
    adapted = any(shape.pair.place.expert for shape in revision.layout.shapes)
    assert worker.enabled.tolist() == [0, int(adapted), 0, 0]


def _only(tensors: Tensors, *kept: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if any(f".{part}." in name for part in kept)}


SPLITS: list[dict[str, Any]] = [
    {}, {"tp": 2, "tp_rank": 1}, {"tp": 2, "tp_rank": 1, "sharded": True}, {"ep": 2, "ep_rank": 1}, {"ep": 4},
    {"dtype": torch.float32},
]  # fmt: skip


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("rank", [1, 4, 8])
def test_separate_experts(rank: int, split: dict[str, Any], tmp_path: Path) -> None:
    tensors = _only(moe.per_expert(BASE, rank), "q_proj", "o_proj", "experts")
    check(Worker(**split), packed(tensors, tmp_path / "a", lora_alpha=7))


@pytest.mark.parametrize("split", SPLITS[:2], ids=str)
@pytest.mark.parametrize("kept", [("q_proj",), ("q_proj", "down_proj"), ("o_proj", "gate_proj"), ("o_proj", "experts")])
def test_some_targets(kept: tuple[str, ...], split: dict[str, Any], tmp_path: Path) -> None:
    tensors = _only(moe.per_expert(BASE, 3, dtype=torch.float32), *kept)
    check(Worker(**split), packed(tensors, tmp_path / "a", lora_alpha=5, use_rslora=True))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_factors_that_experts_share(split: dict[str, Any], tmp_path: Path) -> None:
    tensors = _only(moe.outer(BASE, 3), "q_proj", "experts")
    check(Worker(**split), packed(tensors, tmp_path / "a", lora_alpha=5))


@pytest.mark.parametrize("split", SPLITS[:2] + SPLITS[3:], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_adapter(fused: bool, interleaved: bool, split: dict[str, Any], tmp_path: Path) -> None:
    tensors, _ = moe.stacked(BASE, 3)
    data = packed(_only(tensors, "q_proj", "experts"), tmp_path / "a", lora_alpha=5, **PARAMETERS)
    check(Worker(fused=fused, interleaved=interleaved, **split), data)


@pytest.mark.parametrize("split", SPLITS[:2] + SPLITS[3:], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kept", [("experts",), ("gate_proj",), ("up_proj", "down_proj")])
def test_separate_gate_and_up_in_a_fused_engine(
    kept: tuple[str, ...], interleaved: bool, split: dict[str, Any], tmp_path: Path
) -> None:
    tensors = _only(moe.per_expert(BASE, 4), "q_proj", *kept)
    check(Worker(fused=True, interleaved=interleaved, **split), packed(tensors, tmp_path / "a", lora_alpha=7))


def test_gate_and_up_that_do_not_fit_a_fused_engine_are_refused(tmp_path: Path) -> None:
    data = packed(_only(moe.per_expert(BASE, 5), "q_proj", "experts"), tmp_path / "a")
    with pytest.raises(ValueError, match="gate and up take rank 10 together"):
        Worker(fused=True).adaptable.plan(read(data).layout)


def test_gate_and_up_apart_are_refused_by_all_workers_of_a_fused_engine_that_splits_ranks(tmp_path: Path) -> None:
    data = packed(_only(moe.per_expert(BASE, 2), "q_proj", "experts"), tmp_path / "a")
    for tp_rank in (0, 1):
        worker = Worker(fused=True, tp=2, tp_rank=tp_rank)
        for layer, experts in worker.experts.items():
            worker.experts[layer] = experts._replace(sharded=True, a_row=tp_rank * MAX_RANK // 2)
        with pytest.raises(ValueError, match="gate and up take rank 4 together"):
            worker.adaptable.plan(read(data).layout)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 24}, "for another base"),
        ({"num_experts": 8}, "for 8 experts"),
        ({"num_hidden_layers": 3}, "layers.2.q is no module of the base"),
    ],
)
def test_an_adapter_of_another_base_is_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    other = moe.base("Qwen3-MoE", **{"num_hidden_layers": 2, "mlp_only_layers": [], **change})
    data = packed(_only(moe.per_expert(other, 2), "q_proj", "experts"), tmp_path / "a", other)
    with pytest.raises(Unfit, match=reason):
        Worker().adaptable.plan(read(data).layout)


def test_what_the_engine_lacks_is_refused_by_name(tmp_path: Path) -> None:
    tensors = moe.per_expert(BASE, 2)
    with pytest.raises(ValueError, match=r"this engine adapts no layers\.0\.k"):
        Worker().adaptable.plan(read(packed(_only(tensors, "q_proj", "k_proj"), tmp_path / "k")).layout)
    with pytest.raises(ValueError, match=r"layers\.0\.q has rank 9, above this engine's 8"):
        Worker().adaptable.plan(read(packed(_only(moe.per_expert(BASE, 9), "q_proj"), tmp_path / "r")).layout)


def test_layers_of_other_workers_are_left_to_them(tmp_path: Path) -> None:
    deep = moe.base("Qwen3-MoE", num_hidden_layers=4, mlp_only_layers=[])
    whole = Worker(shape=deep)
    data = packed(_only(moe.per_expert(deep, 2), "q_proj", "experts"), tmp_path / "a", deep)
    with pytest.raises(ValueError, match=r"this engine adapts no layers\.2"):
        whole.adaptable.plan(read(data).layout)
    whole.adaptable = Adaptable(
        deep, whole.linears, whole.experts, [whole.rest], max_rank=MAX_RANK, split_over_layers=True
    )
    check(whole, data)


def test_targets_are_told_by_our_names() -> None:
    assert Worker().adaptable.targets() == [
        "experts.down", "experts.gate", "experts.gate_up", "experts.up", "o", "q",
    ]  # fmt: skip


def test_adapters_of_one_layout_share_it_whatever_their_alpha(tmp_path: Path) -> None:
    headers = Headers()
    tensors = _only(moe.per_expert(BASE, 4), "q_proj", "experts")
    others = _only(moe.per_expert(BASE, 4, seed=1), "q_proj", "experts")
    one, other, smaller = (
        read(data, headers)
        for data in (
            packed(tensors, tmp_path / "a", lora_alpha=8),
            packed(others, tmp_path / "b", lora_alpha=16),
            packed(_only(moe.per_expert(BASE, 2), "q_proj", "experts"), tmp_path / "c"),
        )
    )
    assert one.layout is other.layout
    assert one.layout != smaller.layout
    assert set(one.scales) == {2.0}
    assert set(other.scales) == {4.0}


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_header_is_refused_or_is_what_the_packer_reads(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    whole = bytearray(_GOOD or _good(tmp_path_factory.mktemp("good")))
    length = int.from_bytes(whole[:8], "little") + 8
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))]) if data.draw(st.booleans()) else bytes(whole)
    try:
        file: RevisionFile | None = RevisionFile(cut)
    except InvalidRequest:
        file = None
    if file is None:
        with pytest.raises(InvalidRequest):
            read(cut, _HEADERS)
    else:
        revision = read(cut, _HEADERS)
        assert revision.data_start == file.data_start
        assert revision.layout == read(cut).layout
        assert revision.scales.tolist() == [np.float32(file.scale(pair)) for pair in file.pairs]


_GOOD = bytearray()
# one for all examples: what it has kept of one must not be told of another
_HEADERS = Headers()


def _good(folder: Path) -> bytearray:
    _GOOD.extend(packed(_only(moe.per_expert(BASE, 2), "q_proj"), folder / "a"))
    return _GOOD


def test_a_plan_that_reads_or_writes_outside_is_not_made() -> None:
    tile = stack(1, 4, 4)
    with pytest.raises(RuntimeError, match="reads past the 15 numbers"):
        Plan.of([Move(tile, Source(0, 0, 4, 4, 4))], [], source_dtype=torch.bfloat16, data_bytes=30)
    with pytest.raises(RuntimeError, match="larger than its tile"):
        Plan.of([Move(tile, Source(0, 0, 5, 4, 5))], [], source_dtype=torch.bfloat16, data_bytes=1000)
    with pytest.raises(RuntimeError, match="not dense"):
        Plan.of([Move(tile.transpose(2, 3))], [], source_dtype=torch.bfloat16, data_bytes=1000)
    with pytest.raises(RuntimeError, match="not one"):
        mixed = [Move(tile), Move(tile.float())]
        Plan.of(mixed, [], source_dtype=torch.bfloat16, data_bytes=1000)
