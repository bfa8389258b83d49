"""All of a worker's model that adapters can reach, under our names, and the plan that brings a layout into it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from backends.arena.header import Layout
from backends.vllm.versions import rename_mapper
from packer.layouts import container_of
from packer.modules import Place
from packer.revision import check_pair
from packer.shape import BaseShape
from wire.outcomes import Unfit

from .modules import Experts, Given, Linear, other_stacks, wrapped_experts, wrapped_linears
from .plan import Move, Plan, Switch

logger = logging.getLogger(__name__)

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_EXPERTS = ("experts.gate", "experts.up", "experts.down", "experts.gate_up")


class Adaptable:
    """Every stacked tensor of the wrapped modules, by the place of the base whose factors it holds.

    ``split_over_layers``: this worker has some of the layers, others have the rest.
    """

    def __init__(
        self,
        base: BaseShape,
        linears: Mapping[Place, Linear],
        experts: Mapping[int, Experts],
        rest: list[torch.Tensor],
        *,
        max_rank: int,
        split_over_layers: bool = False,
    ) -> None:
        self._base = base
        self._linears = linears
        self._experts = experts
        self._rest = rest
        self._max_rank = max_rank
        self._split_over_layers = split_over_layers

    @classmethod
    def of(cls, manager: Any, base: BaseShape, *, split_over_layers: bool) -> Adaptable:
        """What vLLM's adapter manager has wrapped of a model whose config.json is ``base``'s."""
        config = manager.lora_config
        names = _Names(base, manager.model)
        linears: dict[Place, Linear] = {}
        experts: dict[int, Experts] = {}
        rest: list[torch.Tensor] = []
        unknown: list[str] = []
        passed_by = bypassed(manager.model, manager.modules)
        for name, module in manager.modules.items():
            layer = names.experts.get(name)
            if layer is not None:
                fused = base.get(Place(layer, "experts.gate_up"))
                found = wrapped_experts(
                    module,
                    fully_sharded=config.fully_sharded_loras,
                    interleaved=fused is not None and fused.interleaved,
                )
                if found is None:
                    raise Unfit(f"{name} has experts of a kind that the plug-in does not know")
                experts[layer] = found
                continue
            parts = manager.packed_modules.get(name, [name])
            places = [names.linears.get(part) for part in parts]
            slices = wrapped_linears(module, fully_sharded=config.fully_sharded_loras)
            if len(slices) != len(parts) or None in places or name in passed_by:
                rest += other_stacks(module)
                unknown.append(name)
                continue
            linears.update((place, part) for place, part in zip(places, slices, strict=True) if place is not None)
        if unknown:
            logger.warning("no adapter can have %d of the modules that vLLM adapts: %s", len(unknown), unknown[:8])
        return cls(base, linears, experts, rest, max_rank=config.max_lora_rank, split_over_layers=split_over_layers)

    def targets(self) -> list[str]:
        """Our names of the modules that adapters may have here, sorted."""
        here = {place.module for place in self._linears}
        layers = [self._base.modules[layer] for layer in self._experts]
        return sorted(here.union(name for layer in layers for name in layer if name in _EXPERTS))

    def plan(self, layout: Layout) -> Plan:
        """Raises Unfit or ValueError for a pair that this model, or this engine, can't hold.

        And RuntimeError for stacks that a plan can't describe.
        """
        given = {shape.pair.place: Given(index, shape) for index, shape in enumerate(layout.shapes)}
        for one in given.values():
            self._check(one)
        switches: list[Switch] = []
        moves = [Move(stack) for stack in self._rest]
        for place, linear in self._linears.items():
            moves += linear.moves(given.get(place))
        for layer, experts in self._experts.items():
            pairs = [given.get(Place(layer, name)) for name in _EXPERTS]
            moves += experts.moves(*pairs)
            switches += experts.switches(any(pairs))
        return Plan.of(
            [move for move in moves if move.tile.numel()],
            switches,
            source_dtype=_DTYPES[layout.dtype],
            data_bytes=layout.data_bytes,
        )

    def _check(self, given: Given) -> None:
        pair = given.shape.pair
        place = pair.place
        check_pair(pair, self._base)
        if pair.rank > self._max_rank:
            raise ValueError(f"{place} has rank {pair.rank}, above this engine's {self._max_rank}")
        here = place.layer in self._experts if place.expert else place in self._linears
        if not here and not self._elsewhere(place.layer):
            raise ValueError(f"this engine adapts no {place}")

    def _elsewhere(self, layer: int) -> bool:
        """Whether another worker has the layer. Those that predict further tokens nobody has."""
        if not self._split_over_layers or layer >= self._base.layers - self._base.mtp:
            return False
        return layer not in self._experts and all(place.layer != layer for place in self._linears)


def bypassed(model: torch.nn.Module, wrapped: Mapping[str, torch.nn.Module]) -> set[str]:
    """Those of the ``wrapped`` modules whose layer another module has too, and calls past the adapter.

    vLLM wraps a router where its block has it, and the experts compute it by a reference of their own.
    """
    holders = Counter(id(child) for holder in model.modules() for child in holder.children())
    return {name for name, module in wrapped.items() if holders[id(getattr(module, "base_layer", None))] > 1}


class _Names:
    """What vLLM calls our places: linear modules' by name, and the layers of MoE modules."""

    def __init__(self, base: BaseShape, model: Any) -> None:
        self.linears: dict[str, Place] = {}
        self.experts: dict[str, int] = {}
        for place, name in _names(base, model):
            if place.expert:
                self.experts[name] = place.layer
            else:
                self.linears[name] = place


def _names(base: BaseShape, model: Any) -> Iterator[tuple[Place, str]]:
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = rename_mapper(model)
    for place, module in base.places():
        path = container_of(module.path) if place.expert else module.path
        peft = f"base_model.model.model.layers.{place.layer}.{path}.lora_A.weight"
        yield place, parse_fine_tuned_lora_name(peft, mapper)[0]
