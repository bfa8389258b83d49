"""LoRA on Megatron's linears: hooks that read A and B of whichever policy is active.

Base modules keep their names and classes. There is one A and B a Hugging Face projection, so the mathematics is PEFT's;
Megatron's interleaving of q, k and v is applied to the output alone. Communication is rank-sized: under tensor
parallelism it is the product with A that is gathered or reduced, never the input or the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from packer.modules import Place

from .experts import Grouped, grouped_linear
from .hf_config import BaseConfig
from .topology import Topology


class Factors(NamedTuple):
    """A and B of one module on this rank, and the scale of their product."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


class Adapters:
    """Puts hooks on a model's linears. ``active`` is what they read: nothing, or one policy's factors by place."""

    def __init__(self, model: GPTModel, base: BaseConfig, topology: Topology) -> None:
        self.active: Mapping[Place, Factors] = {}
        self._base = base
        self._topology = topology
        for layer, block in zip(topology.layers(base.layers), model.decoder.layers, strict=True):
            attention, mlp = block.self_attention, block.mlp
            attention.linear_qkv.register_forward_hook(_Hook(self, layer, "qkv"))
            attention.linear_proj.register_forward_hook(_Hook(self, layer, "o"))
            if base.moe_layers[layer]:
                mlp.experts.adapt = _ExpertHook(self, layer)
            else:
                mlp.linear_fc1.register_forward_hook(_Hook(self, layer, "gate_up"))
                mlp.linear_fc2.register_forward_hook(_Hook(self, layer, "down"))

    def delta(self, layer: int, linear: str, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor | None:
        """What the active policy adds to ``output`` of a linear whose input is ``x``; None for nothing."""
        modules = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}.get(linear, (linear,))
        factors = [self.active.get(Place(layer, module)) for module in modules]
        if not any(factors):
            return None
        if linear in ("o", "down"):
            return self._row(x, factors[0])
        deltas = self._columns(x, factors)
        return self._interleave(deltas, output) if linear == "qkv" else _side_by_side(deltas, output)

    def expert_delta(self, layer: int, module: str, rows: torch.Tensor, grouped: Grouped) -> torch.Tensor | None:
        factors = self.active.get(Place(layer, f"experts.{module}"))
        if factors is None:
            return None
        middle = grouped_linear(rows, factors.a.to(rows.dtype), grouped) * factors.scale
        return grouped_linear(middle, factors.b.to(rows.dtype), grouped)

    def _columns(self, x: torch.Tensor, factors: list[Factors | None]) -> list[torch.Tensor | None]:
        """Column-parallel linears that share their input: A is whole on each rank, B has the rank's rows."""
        present = [pair for pair in factors if pair is not None]
        middle = F.linear(x, torch.cat([pair.a for pair in present]).to(x.dtype))
        if self._topology.sequence:
            middle = gather_from_sequence_parallel_region(middle, tensor_parallel_output_grad=True)
        elif self._topology.tensor > 1:
            middle = copy_to_tensor_model_parallel_region(middle)
        middles = iter(torch.split(middle, [len(pair.a) for pair in present], dim=-1))
        return [None if pair is None else F.linear(next(middles) * pair.scale, pair.b.to(x.dtype)) for pair in factors]

    def _row(self, x: torch.Tensor, factors: Factors | None) -> torch.Tensor | None:
        """A row-parallel linear: A has the rank's columns, B is whole on each rank."""
        if factors is None:
            return None
        middle = F.linear(x, factors.a.to(x.dtype))
        if self._topology.sequence:
            middle = reduce_scatter_to_sequence_parallel_region(middle)
        elif self._topology.tensor > 1:
            middle = reduce_from_tensor_model_parallel_region(middle)
        return F.linear(middle * factors.scale, factors.b.to(x.dtype))

    def _interleave(self, deltas: list[torch.Tensor | None], output: torch.Tensor) -> torch.Tensor:
        """q, k and v in Megatron's order: for each key head its queries, its key, its value."""
        groups = self._base.kv_heads // self._topology.tensor
        widths = (self._base.heads // self._base.kv_heads, 1, 1)
        parts = [
            output.new_zeros(*output.shape[:-1], groups, width * self._base.head_dim)
            if delta is None
            else delta.reshape(*output.shape[:-1], groups, -1)
            for delta, width in zip(deltas, widths, strict=True)
        ]
        return torch.cat(parts, dim=-1).reshape(output.shape)


class _Hook:
    def __init__(self, adapters: Adapters, layer: int, linear: str) -> None:
        self._adapters = adapters
        self._layer = layer
        self._linear = linear

    def __call__(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...], outputs: Any) -> Any:
        output, bias = outputs
        delta = self._adapters.delta(self._layer, self._linear, inputs[0], output)
        return outputs if delta is None else (output + delta, bias)


class _ExpertHook:
    def __init__(self, adapters: Adapters, layer: int) -> None:
        self._adapters = adapters
        self._layer = layer

    def __call__(self, module: str, rows: torch.Tensor, grouped: Grouped) -> torch.Tensor | None:
        return self._adapters.expert_delta(self._layer, module, rows, grouped)


def _side_by_side(deltas: list[torch.Tensor | None], output: torch.Tensor) -> torch.Tensor:
    """Gate before up, as the linear that computes both has them."""
    half = output.shape[-1] // 2
    parts = [output.new_zeros(*output.shape[:-1], half) if delta is None else delta for delta in deltas]
    return torch.cat(parts, dim=-1)
