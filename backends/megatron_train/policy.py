"""One policy on this rank: parameters, gradients and Adam's moments in one flat buffer, and the views into it."""

from __future__ import annotations

import math

import torch
from blake3 import blake3

from packer.modules import Place
from packer.scaling import scale
from wire.trainer import PolicySpec

from .hf_config import BaseConfig
from .layout import Layout, Slot
from .lora import Factors

PARAMETERS, GRADIENTS, FIRST_MOMENTS, SECOND_MOMENTS = range(4)
KINDS = ("parameters", "gradients", "first_moments", "second_moments")


class Policy:
    """``buffer`` is (4, layout.size) in fp32, by ``KINDS``, wherever it lies now; None while it is on disk.

    ``step`` counts optimiser steps. ``accumulated``: whether there are gradients that no step has used.
    """

    def __init__(self, spec: PolicySpec, layout: Layout, buffer: torch.Tensor) -> None:
        self.spec = spec
        self.layout = layout
        self.step = 0
        self.accumulated = False
        self.nbytes = buffer.nbytes
        self._buffer: torch.Tensor | None = buffer
        self._leaves: dict[Slot, torch.Tensor] | None = None
        self._factors: dict[Place, Factors] | None = None

    @property
    def buffer(self) -> torch.Tensor:
        assert self._buffer is not None, "the policy is on disk"
        return self._buffer

    def place_buffer(self, buffer: torch.Tensor | None) -> None:
        """Let the policy lie elsewhere: views of the old place are forgotten."""
        self._buffer = buffer
        self._leaves = self._factors = None

    @property
    def parameters(self) -> torch.Tensor:
        return self.buffer[PARAMETERS]

    @property
    def gradients(self) -> torch.Tensor:
        return self.buffer[GRADIENTS]

    @property
    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.buffer[FIRST_MOMENTS], self.buffer[SECOND_MOMENTS]

    @property
    def leaves(self) -> dict[Slot, torch.Tensor]:
        """Each tensor's parameters as a leaf of autograd, a view into the buffer."""
        if self._leaves is None:
            self._leaves = {slot: view(self.parameters, slot).detach().requires_grad_() for slot in self.layout.slots}
        return self._leaves

    @property
    def factors(self) -> dict[Place, Factors]:
        """What the hooks read."""
        if self._factors is None:
            by_name = {(slot.place, slot.factor): leaf for slot, leaf in self.leaves.items()}
            by = scale(self.spec.alpha, self.spec.rank, rslora=False)
            self._factors = {
                place: Factors(leaf, by_name[place, "B"], by)
                for (place, factor), leaf in by_name.items()
                if factor == "A"
            }
        return self._factors

    def drop_gradients(self) -> None:
        self.gradients.zero_()
        self.accumulated = False


def view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """A tensor's part of a flat buffer, in its shape."""
    return flat[slot.offset : slot.offset + slot.size].view(slot.local_shape)


def first_values(policy: Policy, base: BaseConfig) -> None:
    """Zero everything but A, which is drawn from U(-1/sqrt(in), 1/sqrt(in)) as in PEFT.

    Each draw follows from the seed and the tensor's name in Hugging Face's terms: the same in every topology.
    """
    policy.buffer.zero_()
    for slot in policy.layout.slots:
        if slot.factor == "A":
            view(policy.parameters, slot).copy_(_draw(policy.spec.seed, slot, base))


def _draw(seed: int, slot: Slot, base: BaseConfig) -> torch.Tensor:
    module = base.shape.modules[slot.place.layer][slot.place.module]
    name = f"model.layers.{slot.place.layer}.{module.path}"
    if slot.place.expert:
        experts = range(slot.start, slot.stop)
        return torch.stack([_uniform(seed, name.format(expert), slot.shape[1:]) for expert in experts])
    whole = _uniform(seed, name, slot.shape)
    return whole if slot.axis is None else whole.narrow(slot.axis, slot.start, slot.stop - slot.start)


def _uniform(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    digest = blake3(f"{seed}\0{name}".encode()).digest(8)
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
