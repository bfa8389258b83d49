"""vLLM's wrapped modules as tiles: which part of which factor each of their stacked tensors holds on this worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from backends.arena.header import Shape
from backends.vllm.versions import expert_rank, shares_factors
from packer.revision import Pair

from .plan import Move, Source, Switch


class Given(NamedTuple):
    """One pair of an adapter, and its place in the revision, which is that of its scale."""

    number: int
    shape: Shape


class Linear(NamedTuple):
    """One slice of a wrapped linear module: stacks of A, (slots, 1, rank, in), and B, (slots, 1, out, rank).

    ``a_row``, ``a_column`` and ``b_row`` are where this worker's part of the factors begins. ``whole``: no part, all.
    """

    a: torch.Tensor
    b: torch.Tensor
    a_row: int = 0
    a_column: int = 0
    b_row: int = 0
    whole: bool = True

    def moves(self, given: Given | None) -> Iterator[Move]:
        """Raises ValueError for a pair of another size."""
        if given is None:
            yield from (Move(self.a), Move(self.b))
            return
        if self.whole:
            _check_sizes(given.shape.pair, self.a.shape[3], self.b.shape[2])
        yield _move(self.a, given, "A", row=self.a_row, column=self.a_column)
        yield _move(self.b, given, "B", row=self.b_row)


class Experts(NamedTuple):
    """A wrapped MoE layer: stacks of (slots, experts, rows, columns), those of gate and up apart or fused in one.

    ``first`` is the first expert that this worker has, ``tp_rank`` its part of the inner dimension; ``a_row`` and
    ``b_row`` are where its part of gate's A and down's B begins. ``sharded``: each worker
    has a part of the ranks. ``interleaved``: rows of a fused gate_up alternate.
    ``collapsed``: gate's and up's A, and down's B, are held once for all experts.
    """

    gate_up_a: tuple[torch.Tensor, ...]
    gate_up_b: tuple[torch.Tensor, ...]
    down_a: torch.Tensor
    down_b: torch.Tensor
    enabled: torch.Tensor
    first: int = 0
    tp_rank: int = 0
    a_row: int = 0
    b_row: int = 0
    whole: bool = True
    sharded: bool = False
    interleaved: bool = False
    collapsed: bool = False

    @property
    def inner(self) -> int:
        """This worker's share of the experts' inner dimension."""
        return self.down_a.shape[3]

    def moves(self, gate: Given | None, up: Given | None, down: Given | None, gate_up: Given | None) -> Iterator[Move]:
        """Raises ValueError for a pair of another size, or one that the stacks can't hold."""
        if self.whole:
            hidden = self.down_b.shape[2]
            for given, outputs in ((gate, self.inner), (up, self.inner), (gate_up, 2 * self.inner)):
                if given is not None:
                    _check_sizes(given.shape.pair, hidden, outputs)
            if down is not None:
                _check_sizes(down.shape.pair, self.inner, hidden)
        if self.collapsed:
            _check_shared(0, gate, up, gate_up)
            _check_shared(1, down)
        if len(self.gate_up_a) == 2:
            yield from self._apart(gate, up, gate_up)
        elif gate_up is not None:
            yield self._move(self.gate_up_a[0], gate_up, "A", row=self.a_row)
            for half, rows in enumerate(self._halves()):
                yield self._half(rows, gate_up, half)
        else:
            yield from self._side_by_side(gate, up)
        yield self._move(self.down_a, down, "A", column=self.tp_rank * self.inner)
        yield self._move(self.down_b, down, "B", row=self.b_row)

    def switches(self, adapted: bool) -> Iterator[Switch]:
        yield Switch(self.enabled, int(adapted))

    def _apart(self, gate: Given | None, up: Given | None, gate_up: Given | None) -> Iterator[Move]:
        for half, given in enumerate((gate, up)):
            yield self._move(self.gate_up_a[half], given or gate_up, "A", row=self.a_row)
            if given is None and gate_up is not None:
                yield self._half(self.gate_up_b[half], gate_up, half)
            else:
                yield self._move(self.gate_up_b[half], given, "B", row=self.tp_rank * self.inner)

    def _half(self, tile: torch.Tensor, gate_up: Given, half: int) -> Move:
        """Gate's (0) or up's (1) rows of a fused B."""
        begin = self.tp_rank * self.inner
        if self.interleaved:
            return self._move(tile, gate_up, "B", row=2 * begin + half, step=2)
        return self._move(tile, gate_up, "B", row=half * (gate_up.shape.pair.outputs // 2) + begin)

    def _halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate's and up's rows of the fused stack of B."""
        b = self.gate_up_b[0]
        return (b[:, :, ::2], b[:, :, 1::2]) if self.interleaved else (b[:, :, : self.inner], b[:, :, self.inner :])

    def _side_by_side(self, gate: Given | None, up: Given | None) -> Iterator[Move]:
        """Separate gate and up where the stacks are fused: one rank after the other, each with zeros for the other."""
        a = self.gate_up_a[0]
        between = gate.shape.pair.rank if gate else 0
        rank = between + (up.shape.pair.rank if up else 0)
        if rank > a.shape[2] or (rank and self.sharded):
            raise ValueError(
                f"gate and up take rank {rank} together, where this engine keeps them as one of {a.shape[2]}"
            )
        yield self._move(a[:, :, :between], gate, "A")
        yield self._move(a[:, :, between:], up, "A")
        for half, (given, rows) in enumerate(zip((gate, up), self._halves(), strict=True)):
            parts = (rows[..., :between], rows[..., between:])
            yield self._move(parts[half], given, "B", row=self.tp_rank * self.inner)
            yield Move(parts[1 - half])

    def _move(
        self, tile: torch.Tensor, given: Given | None, factor: str, *, row: int = 0, column: int = 0, step: int = 1
    ) -> Move:
        if given is None:
            return Move(tile)
        return _move(tile, given, factor, first=self.first, row=row, column=column, step=step)


def wrapped_linears(module: Any, *, fully_sharded: bool) -> list[Linear]:
    """The slices of a wrapped linear module, in vLLM's order; none for a kind that we don't know."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear

    base = module.base_layer
    if isinstance(base, ReplicatedLinear):
        return [Linear(a, b) for a, b in zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)]
    if not isinstance(base, ColumnParallelLinear | RowParallelLinear):
        return []
    rank, split = module.tp_rank, module.tp_size > 1
    ranks_split = split and fully_sharded
    if isinstance(base, RowParallelLinear):
        (a,), (b,) = module.lora_a_stacked, module.lora_b_stacked
        return [Linear(a, b, 0, rank * a.shape[3], rank * b.shape[2] if ranks_split else 0, whole=not split)]
    starts: Sequence[int]
    if hasattr(module, "output_ids"):
        starts = module.output_ids
    elif type(base) is ColumnParallelLinear or not split:
        starts = (rank,)
    else:
        return []
    return [
        Linear(a, b, rank * a.shape[2] if ranks_split else 0, 0, start * b.shape[2], whole=not split)
        for a, b, start in zip(module.lora_a_stacked, module.lora_b_stacked, starts, strict=True)
    ]


def wrapped_experts(module: Any, *, fully_sharded: bool, interleaved: bool) -> Experts | None:
    """A wrapped MoE layer; None for experts without a gate."""
    from vllm.lora.layers import FusedMoE3DWithLoRA

    fused = isinstance(module, FusedMoE3DWithLoRA)
    if len(module.w13_lora_a_stacked) != (1 if fused else 2):
        return None
    rank, split = module.tp_rank, module.tp_size > 1
    a, down_a, down_b = module.w13_lora_a_stacked, module.w2_lora_a_stacked[0], module.w2_lora_b_stacked[0]
    ranks_split = split and fully_sharded
    return Experts(
        gate_up_a=tuple(a),
        gate_up_b=tuple(module.w13_lora_b_stacked),
        down_a=down_a,
        down_b=down_b,
        enabled=module.adapter_enabled,
        first=expert_rank(module) * down_a.shape[1],
        tp_rank=rank,
        a_row=rank * a[0].shape[2] if ranks_split else 0,
        b_row=rank * down_b.shape[2] if ranks_split else 0,
        whole=not split,
        sharded=ranks_split,
        interleaved=interleaved,
        collapsed=shares_factors(module),
    )


def other_stacks(module: Any) -> list[torch.Tensor]:
    """The stacked tensors of a module that no revision adapts, (slots, ..., rows, columns): to be zeroed."""
    stacks = []
    for name in ("lora_a_stacked", "lora_b_stacked"):
        found = getattr(module, name)
        stacks += [found] if isinstance(found, torch.Tensor) else list(found)
    return [stack if stack.dim() == 4 else stack.unsqueeze(1) for stack in stacks]


def _check_sizes(pair: Pair, inputs: int, outputs: int) -> None:
    if (pair.inputs, pair.outputs) != (inputs, outputs):
        raise ValueError(
            f"{pair.place} adapts {pair.inputs} -> {pair.outputs} where the engine's module is {inputs} -> {outputs}"
        )


def _check_shared(factor: int, *pairs: Given | None) -> None:
    for given in pairs:
        if given is not None and given.shape.pair.experts[factor] != 1:
            place = given.shape.pair.place
            raise ValueError(f"{place}.{'AB'[factor]} is of each expert, but this engine holds one for all of them")


def _move(
    tile: torch.Tensor, given: Given, factor: str, *, first: int = 0, row: int = 0, column: int = 0, step: int = 1
) -> Move:
    """Fill ``tile`` from a factor, from expert ``first``, ``row`` and ``column`` on, every ``step``-th row."""
    pair = given.shape.pair
    place = pair.place
    which = "AB".index(factor)
    *stack, rows, columns = pair.shapes[which]
    _, experts, tile_rows, tile_columns = tile.shape
    have = stack[0] if stack else 1
    if have != 1 and first + experts > have:
        raise ValueError(f"{place}.{factor} is of {have} experts, of which this engine holds {experts} from {first} on")
    taken_rows = min(tile_rows, len(range(row, rows, step)))
    taken_columns = min(tile_columns, columns - column)
    filled = taken_columns == tile_columns if factor == "A" else taken_rows == tile_rows
    if not filled:
        raise ValueError(f"{place}.{factor} is {rows} x {columns}: too small for the engine's module")
    if taken_rows <= 0 or taken_columns <= 0:
        return Move(tile)
    offset = (given.shape.b if which else given.shape.a) + row * columns + column
    expert_stride = rows * columns if have > 1 else 0
    scale = given.number if factor == "B" else -1
    source = Source(offset + first * expert_stride, expert_stride, step * columns, taken_rows, taken_columns, scale)
    return Move(tile, source)
