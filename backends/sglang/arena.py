"""Inside a scheduler: an adapter goes from the host's arena into its slot, without a file and without SGLang's loader.

What SGLang's memory pool holds of a slot: dense A of (parts x rank, in), the parts of q/k/v or gate/up one right behind
the other, dense B of (out, largest rank); of experts A of (experts, parts x largest rank, in), each part where the
largest rank lets it begin, and B of (experts, out, largest rank) with the scale in it. A dense product is scaled when
it is computed, by one scale for the whole adapter; scales that differ are folded into B.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from backends.arena.header import Headers, Revision, copy_header
from backends.arena.segment import OutOfReach, Segments
from backends.extent_path import parse
from packer.modules import Place
from wire.outcomes import Unfit

# SGLang's buffers, and the modules whose factors lie in each, in its order
_BUFFERS = {
    "qkv_proj": ("q", "k", "v"), "o_proj": ("o",), "gate_up_proj": ("gate", "up"), "down_proj": ("down",),
    "gate_up_proj_moe": ("experts.gate", "experts.up"), "down_proj_moe": ("experts.down",),
}  # fmt: skip
_FUSED = "experts.gate_up"
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


class Written(NamedTuple):
    """What SGLang must know of an adapter in its slot."""

    rank: int
    scaling: float


class _Unpinned:
    """Mappings are read as they are."""

    def mapped(self, segment: memoryview) -> None:
        return None

    def unmapped(self, segment: memoryview, close: Callable[[], None]) -> None:
        close()


class _Part(NamedTuple):
    """A's and B's bytes as tensors, and the pair's scale."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


class ArenaReader:
    """Reads revisions out of the segments of this host into the slots of one memory pool."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._segments = Segments(_Unpinned())
        self._headers = Headers()

    def write(self, path: str, slot: int) -> Written:
        """Fill ``slot`` with the adapter in the extent that ``path`` names.

        Raises OutOfReach, StaleExtent, ValueError or Unfit; the slot may hold anything then.
        """
        pool = self._manager.memory_pool
        if pool.tp_size > 1 or pool.moe_ep_size > 1:
            raise OutOfReach("an engine of several workers reads no arena")
        extent = parse(path)
        segment = self._segments.get(extent.segment)
        segment.check(extent)
        data = segment.data(extent)
        revision = self._headers.read(copy_header(data), extent.length)
        segment.check(extent)
        written = self._fill(revision, data[revision.data_start :], slot)
        if self._manager.device.type == "cuda":
            torch.cuda.synchronize()
        segment.check(extent)
        return written

    def _fill(self, revision: Revision, data: memoryview, slot: int) -> Written:
        pool, layout = self._manager.memory_pool, revision.layout
        parts = dict(_parts(revision, data))
        rank = max(shape.pair.rank for shape in layout.shapes)
        if rank > pool.max_lora_rank:
            raise Unfit(f"rank {rank} is above this engine's {pool.max_lora_rank}", field="rank")
        scales = {part.scale for part in parts.values()}
        common = scales.pop() if len(scales) == 1 else 1.0
        for name, modules in _BUFFERS.items():
            for layer in range(pool.num_layer if name in pool.A_buffer else 0):
                given = [parts.pop(Place(layer, module), None) for module in modules]
                a, b = pool.A_buffer[name][layer][slot], pool.B_buffer[name][layer][slot]
                if name.endswith("_moe"):
                    _write_group(a, b, given, self._ends(name, layer, b), pool.max_lora_rank, 1.0)
                else:
                    _write_group(a[: rank * len(given)], b[:, :rank], given, self._ends(name, layer, b), rank, common)
        if parts:
            raise Unfit(f"this engine can't change {next(iter(parts))}", field=str(next(iter(parts))))
        return Written(rank, common)

    def _ends(self, name: str, layer: int, b: torch.Tensor) -> list[int]:
        """Where the rows of each part of B end."""
        rows = b.shape[-2]
        if name == "qkv_proj":
            for module in self._manager.lora_modules[layer].values():
                base: Any = getattr(module, "base_layer", None)
                if hasattr(base, "q_proj_shard_size"):
                    q, kv = int(base.q_proj_shard_size), int(base.kv_proj_shard_size)
                    return [q, q + kv, q + 2 * kv]
        parts = len(_BUFFERS[name])
        return [rows * (part + 1) // parts for part in range(parts)]


def _parts(revision: Revision, data: memoryview) -> Iterator[tuple[Place, _Part]]:
    """Every pair's factors, a fused gate_up as gate and up."""
    with warnings.catch_warnings():
        # the mapping is read-only, and nothing writes to it
        warnings.simplefilter("ignore", UserWarning)
        tensors = torch.frombuffer(data, dtype=_DTYPES[revision.layout.dtype])
    for shape, scale in zip(revision.layout.shapes, revision.scales.tolist(), strict=True):
        pair = shape.pair
        a, b = (_at(tensors, start, dims) for start, dims in zip((shape.a, shape.b), pair.shapes, strict=True))
        if pair.place.module != _FUSED:
            yield pair.place, _Part(a, b, scale)
            continue
        gate, up = b.chunk(2, dim=-2)
        yield Place(pair.place.layer, "experts.gate"), _Part(a, gate, scale)
        yield Place(pair.place.layer, "experts.up"), _Part(a, up, scale)


def _at(tensors: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    return tensors[start : start + torch.Size(shape).numel()].view(shape)


def _write_group(
    a: torch.Tensor, b: torch.Tensor, given: list[_Part | None], ends: list[int], spacing: int, scaled: float
) -> None:
    """Write the parts of a group of modules, zeros where there is none. SGLang itself scales by ``scaled``."""
    if any(part is None or part.a.shape[-2] < spacing for part in given):
        a.zero_()
        b.zero_()
    start = 0
    for number, (part, end) in enumerate(zip(given, ends, strict=True)):
        if part is not None:
            rank = part.a.shape[-2]
            rows = b[..., start:end, :rank]
            a[..., number * spacing : number * spacing + rank, :].copy_(_fit(part.a, a.shape[-1], "A"))
            rows.copy_(_fit(part.b.mT, end - start, "B").mT)
            if part.scale != scaled:
                rows.mul_(part.scale / scaled)
        start = end


def _fit(factor: torch.Tensor, size: int, name: str) -> torch.Tensor:
    """Raises ValueError for another size than the model's, which a copy would repeat."""
    if factor.shape[-1] != size:
        raise ValueError(f"{name} has {factor.shape[-1]} where the model has {size}")
    return factor
