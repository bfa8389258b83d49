"""LoRA on Megatron's linears: hooks that read A and B of whichever policy is active.

Base modules keep their names and classes. There is one A and B a Hugging Face projection, so the mathematics is PEFT's;
Megatron's interleaving of q, k and v is applied to the output alone. Communication is rank-sized: under tensor
parallelism it is the product with A that is gathered or reduced, never the input or the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
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
from .products import Columns, Product, add_products
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

    def add(self, layer: int, linear: str, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """``output`` of a linear with input ``x``, and what the active policy adds to it. May change ``output``."""
        modules = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}.get(linear, (linear,))
        factors = [self.active.get(Place(layer, module)) for module in modules]
        if not any(factors):
            return output
        if linear in ("o", "down"):
            return self._row(x, factors[0], output)
        groups, widths = self._blocks(linear, output)
        starts = (0, *accumulate(widths))
        places = [Columns(start, width) for start, width in zip(starts, widths, strict=False)]
        present = [(at, pair) for at, pair in zip(places, factors, strict=True) if pair is not None]
        middles = self._middles(x, [pair for _, pair in present])
        products = [
            Product(at, middle * pair.scale, pair.b.to(x.dtype))
            for (at, pair), middle in zip(present, middles, strict=True)
        ]
        return add_products(output, groups, products)

    def expert_delta(self, layer: int, module: str, rows: torch.Tensor, grouped: Grouped) -> torch.Tensor | None:
        factors = self.active.get(Place(layer, f"experts.{module}"))
        if factors is None:
            return None
        middle = grouped_linear(rows, factors.a.to(rows.dtype), grouped) * factors.scale
        return grouped_linear(middle, factors.b.to(rows.dtype), grouped)

    def _middles(self, x: torch.Tensor, factors: list[Factors]) -> tuple[torch.Tensor, ...]:
        """Products with A of column-parallel linears that share their input: A is whole on each rank."""
        middle = F.linear(x, torch.cat([pair.a for pair in factors]).to(x.dtype))
        if self._topology.sequence:
            middle = gather_from_sequence_parallel_region(middle, tensor_parallel_output_grad=True)
        elif self._topology.tensor > 1:
            middle = copy_to_tensor_model_parallel_region(middle)
        return torch.split(middle, [len(pair.a) for pair in factors], dim=-1)

    def _row(self, x: torch.Tensor, factors: Factors | None, output: torch.Tensor) -> torch.Tensor:
        """A row-parallel linear: A has the rank's columns, B is whole on each rank."""
        if factors is None:
            return output
        middle = F.linear(x, factors.a.to(x.dtype))
        if self._topology.sequence:
            middle = reduce_scatter_to_sequence_parallel_region(middle)
        elif self._topology.tensor > 1:
            middle = reduce_from_tensor_model_parallel_region(middle)
        rows, b = (middle * factors.scale).flatten(0, -2), factors.b.to(x.dtype)
        return torch.addmm(output.flatten(0, -2), rows, b.t()).view_as(output)

    def _blocks(self, linear: str, output: torch.Tensor) -> tuple[int, tuple[int, ...]]:
        """How many blocks Megatron's output has, and the widths of the projections in each.

        For q, k and v: for each key head its queries, its key, its value. Else gate before up.
        """
        if linear == "qkv":
            head = self._base.head_dim
            queries = self._base.heads // self._base.kv_heads
            return self._base.kv_heads // self._topology.tensor, (queries * head, head, head)
        half = output.shape[-1] // 2
        return 1, (half, half)


class _Hook:
    def __init__(self, adapters: Adapters, layer: int, linear: str) -> None:
        self._adapters = adapters
        self._layer = layer
        self._linear = linear

    def __call__(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...], outputs: Any) -> Any:
        output, bias = outputs
        return self._adapters.add(self._layer, self._linear, inputs[0], output), bias


class _ExpertHook:
    def __init__(self, adapters: Adapters, layer: int) -> None:
        self._adapters = adapters
        self._layer = layer

    def __call__(self, module: str, rows: torch.Tensor, grouped: Grouped) -> torch.Tensor | None:
        return self._adapters.expert_delta(self._layer, module, rows, grouped)
