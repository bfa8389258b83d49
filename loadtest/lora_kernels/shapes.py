"""Which of vLLM's LoRA kernels a base calls, how wide, and how often."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from packer.folder import read_bounded
from packer.shape import MAX_CONFIG_BYTES, BaseShape
from wire.outcomes import Unfit

# the modules that vLLM computes in one call: those on one line share their input. Experts have kernels of their own.
_CALLS = (
    ("q", "k", "v"),
    ("q_a", "kv_a"),
    ("q_b",),
    ("kv_b",),
    ("o",),
    ("gate", "up"),
    ("down",),
    ("shared.gate", "shared.up"),
    ("shared.down",),
)
_TOKENS_AN_ADAPTER = 64


class Kernel(msgspec.Struct, frozen=True):
    """One kind of call. ``op``: ``shrink`` (to the rank) or ``expand`` (from it). ``widths``: of each of its slices,
    the dimension on the base's side."""

    op: str
    widths: tuple[int, ...]

    @property
    def slices(self) -> int:
        return len(self.widths)

    @property
    def width(self) -> int:
        """What vLLM calls the hidden size."""
        return max(self.widths)

    def __str__(self) -> str:
        return f"{self.op}_{'_'.join(map(str, self.widths))}"


class Work(msgspec.Struct, frozen=True):
    """What a base asks: ``calls`` counts each kernel's over all its ``layers``."""

    calls: dict[Kernel, int]
    layers: int


def read_work(model: Path) -> Work:
    """Of a ``config.json``, or the folder of one. Raises InvalidRequest, ArtifactUnavailable or Unfit."""
    path = model / "config.json" if model.is_dir() else model
    return work_of(BaseShape.from_config(read_bounded(path, MAX_CONFIG_BYTES)))


def work_of(shape: BaseShape) -> Work:
    """Raises Unfit for a base that has none of these modules."""
    layers = shape.modules[: shape.layers - shape.mtp]
    calls: Counter[Kernel] = Counter()
    for layer in layers:
        for names in _CALLS:
            modules = [layer[name] for name in names if name in layer]
            if modules:
                calls[Kernel("shrink", tuple(module.inputs for module in modules))] += 1
                calls[Kernel("expand", tuple(module.outputs for module in modules))] += 1
    if not calls:
        raise Unfit(f"{shape.architecture} has no layer that these kernels compute", field="model")
    return Work(dict(calls), len(layers))


def adapters_in(tokens: int, slots: int) -> int:
    """How many adapters a batch is of: one for each 64 tokens."""
    return min(slots, max(1, tokens // _TOKENS_AN_ADAPTER))


def launched_for(adapters: int, slots: int, *, specialised: bool) -> int:
    """For how many adapters vLLM launches a kernel: all its slots and the base, or with ``--specialize-active-lora``
    those of the batch, up to the next power of two, for which it has captured a graph."""
    if not specialised:
        return slots + 1
    return min(slots + 1, 1 << (adapters - 1).bit_length())
