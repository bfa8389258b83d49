"""Adapters to install: each as an extent of an arena and as the PEFT folder that a stock loader reads."""

from __future__ import annotations

import json
import mmap
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from backends.interface import Installable
from catalog.names import adapter_name
from packer import adapter_config
from packer.revision import Pair, make_content
from packer.shape import BaseShape
from packer.unpack import write_peft
from sidecar.arena import Arena
from sidecar.extents import ALIGN, HEADER_BYTES, Extent, block_bytes

# modules that stock vLLM adapts one by one: neither the router nor the fused gate_up
_LEFT_OUT = ("router", "experts.gate_up")
# 3 times a bfloat16 is none, mostly: what folds the scale must round as stock does
SCALE = 3
# numbers drawn; a longer adapter repeats them
_DRAWN = (1 << 22) + 3
# adapters of a high rank are gigabytes: fewer, installed under several names
_MOST_BYTES = 4 << 30


class Adapter(msgspec.Struct, frozen=True):
    """One revision, by both ways to install it. ``path`` of its folder; ``data_start`` counts from the extent's."""

    digest: str
    rank: int
    segment: str
    extent: Extent
    data_start: int
    folder: str

    def installable(self, tenant: str) -> Installable:
        """As a sidecar hands it to a driver; another tenant makes another adapter of it."""
        return Installable(
            adapter=adapter_name(tenant, self.digest), digest=self.digest, rank=self.rank, segment=self.segment,
            offset=self.extent.offset, length=self.extent.length, generation=self.extent.generation,
            view=lambda: map_extent(self),
        )  # fmt: skip


class Adapters:
    """``count`` adapters of ``rank`` over ``shape``, or as many as the bytes allow.

    A context that makes them, of gigabytes of the host's memory, and removes them. ``targets`` are what their folders
    name as adapted modules, for a loader that takes no expression.
    """

    def __init__(
        self, root: Path, shape: BaseShape, rank: int, count: int, seed: int, targets: Sequence[str] = ()
    ) -> None:
        self._targets = targets
        self._folders = root / f"rank-{rank}"
        content = make_content(_pairs(shape, rank), "BF16", rank=rank, alpha=SCALE * rank, rslora=False)
        header = content.header()
        size = len(header) + 2 * sum(sum(pair.elements) for pair in content.pairs)
        count = min(count, max(1, _MOST_BYTES // size))
        block = block_bytes(size)
        self._rank, self._header, self._seed = rank, header, seed
        self._extents = [Extent(number * block + HEADER_BYTES, size, number + 1) for number in range(count)]
        self._segment = f"roost-loadtest-{root.name}-{rank}"
        self.all: list[Adapter] = []

    def __enter__(self) -> Adapters:
        last = self._extents[-1]
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, self._folders, ignore_errors=True)
            arena = Arena(self._segment, last.offset + block_bytes(last.length) + ALIGN)
            undo.callback(arena.close)
            for number, extent in enumerate(self._extents):
                self.all.append(self._make(arena, extent, number))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _make(self, arena: Arena, extent: Extent, number: int) -> Adapter:
        view = arena.begin(extent)
        view[: len(self._header)] = self._header
        _fill(view[len(self._header) :], self._seed + number)
        digest = blake3(view, max_threads=blake3.AUTO).hexdigest()
        arena.seal(extent, digest)
        folder = self._folders / str(number)
        write_peft(view, folder)
        if self._targets:
            config = folder / adapter_config.NAME
            config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": [*self._targets]}))
        return Adapter(digest, self._rank, arena.segment, extent, len(self._header), str(folder))

    def named(self, count: int) -> list[tuple[str, Adapter]]:
        """``count`` of them, each under a tenant, over again where there are fewer."""
        return [(f"tenant-{number}", self.all[number % len(self.all)]) for number in range(count)]


def map_extent(adapter: Adapter) -> memoryview:
    """The extent's bytes, read-only, mapped anew."""
    with (Path("/dev/shm") / adapter.segment).open("rb") as file:  # noqa: S108
        mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    return memoryview(mapping)[adapter.extent.offset : adapter.extent.offset + adapter.extent.length]


def _pairs(shape: BaseShape, rank: int) -> list[Pair]:
    return [
        Pair(place, rank, SCALE * rank, module.inputs, module.outputs, (module.experts, module.experts))
        for place, module in shape.places()
        if place.module not in _LEFT_OUT
    ]


def _fill(data: memoryview, seed: int) -> None:
    """Normal numbers in bfloat16: large beside made-up weights, so that every adapter answers otherwise."""
    drawn = np.random.default_rng(seed).standard_normal(_DRAWN, np.float32)
    numbers = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    out = np.frombuffer(data, np.uint16)
    for start in range(0, out.size, numbers.size):
        part = out[start : start + numbers.size]
        part[:] = numbers[: part.size]
