"""Inside a worker on CPU: experts that adapters can change, in torch.

vLLM picks its Triton experts for every MoE that may have adapters, on CPU too, where the first forward pass ends the
engine. These compute what those do: per token and expert, gate's and up's product is added before the activation, and
down's before the router's weight. Adapters' products are computed in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin

from . import versions

_stock_select = method.select_unquantized_moe_backend

# a token of the base, in vLLM's indices of slots
_BASE = -1
# what is gathered for a batch is 64 MB of factors, of rank 8 and a width of 2048
_MOST_ROWS = 1024


def patch() -> None:
    """Have MoE layers with adapters use our experts. Raises UnsupportedVllm."""
    versions.check(versions.CPU_MOE_SEAMS)
    versions.check_attributes(LoRAExpertsMixin, ("_lora_context",))
    method.select_unquantized_moe_backend = select_backend


@functools.wraps(_stock_select)
def select_backend(moe_config: Any) -> Any:
    """Our experts where adapters are enabled. Raises UnsupportedVllm for a kind that they don't know."""
    if not moe_config.is_lora_enabled:
        return _stock_select(moe_config)
    if moe_config.activation != MoEActivation.SILU or not moe_config.is_act_and_mul or moe_config.has_bias:
        raise versions.UnsupportedVllm("adapters on CPU need experts with a SiLU gate and without bias")
    return method.UnquantizedMoeBackend.CPU, TorchExperts


class Batch(NamedTuple):
    """Groups, each the rows of one slot and one expert, that are multiplied in one call.

    ``pairs`` and ``slots`` have an entry a group, ``pairs`` counting a slot's experts one after another. ``rows``
    (groups, width) are places in the sorted assignments; where a group has fewer, its last row stands there again, and
    ``real`` says which are meant (None: all).
    """

    pairs: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    real: torch.Tensor | None


class TorchExperts(LoRAExpertsMixin, CPUUnquantizedExperts):  # type: ignore[misc]
    """One pass over the experts that have tokens, one over the pairs of those and slots. Weights stay as loaded."""

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return bool(activation == MoEActivation.SILU)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """The stock experts repack the weights for their kernel here."""

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        tokens, experts, slots, weights = self._assignments(hidden_states, topk_ids, topk_weights, expert_map)
        x = hidden_states[tokens]
        adapted = list(_batches(experts, slots, w1.shape[0]))
        gate_up = _each(x, w1, experts)
        inner = gate_up.shape[1] // 2
        context = self._lora_context
        if context is not None:
            width = gate_up.shape[1] // context.w13_num_slices
            stacks = zip(context.w13_lora_a_stacked, context.w13_lora_b_stacked, strict=True)
            for number, (a, b) in enumerate(stacks):
                _add(gate_up[:, number * width : (number + 1) * width], x, a, b, adapted)
        x = functional.silu(gate_up[:, :inner]) * gate_up[:, inner:]
        y = _each(x, w2, experts)
        if context is not None:
            _add(y, x, context.w2_lora_a_stacked[0], context.w2_lora_b_stacked[0], adapted)
        y = y.float()
        if not apply_router_weight_on_input:
            y *= weights[:, None]
        output.copy_(torch.zeros(output.shape, dtype=torch.float32).index_add_(0, tokens, y))

    def _assignments(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """For each token and each expert of it that is here: token, expert, slot, weight; by expert and slot."""
        count, chosen = topk_ids.shape
        experts = topk_ids.flatten().long()
        if expert_map is not None:
            experts = expert_map[experts].long()
        tokens = torch.arange(count).repeat_interleave(chosen)
        slots = _slots_of_tokens(self._lora_context, count)[tokens]
        order = torch.argsort(slots, stable=True)
        order = order[torch.argsort(experts[order], stable=True)]
        order = order[experts[order] >= 0]
        return tokens[order], experts[order], slots[order], topk_weights.flatten()[order]


def _slots_of_tokens(context: MoELoRAContext | None, count: int) -> torch.Tensor:
    slots = torch.full((count,), _BASE, dtype=torch.long)
    if context is not None:
        known = context.punica_wrapper.token_lora_indices[:count]
        slots[: known.shape[0]] = known
    return slots


def _batches(experts: torch.Tensor, slots: torch.Tensor, count: int) -> Iterator[Batch]:
    """Runs of equal (slot, expert), those of the base left out, by their sizes' next power of two.

    ``count`` is how many experts there are.
    """
    (adapted,) = torch.nonzero(slots != _BASE, as_tuple=True)
    slots = slots[adapted]
    pairs = slots * count + experts[adapted]
    if adapted.numel() <= _MOST_ROWS and not torch.any(pairs[1:] == pairs[:-1]):
        # the usual case while tokens are decoded
        if adapted.numel():
            yield Batch(pairs, slots, adapted[:, None], None)
        return
    _, sizes = torch.unique_consecutive(pairs, return_counts=True)
    begins = sizes.cumsum(0) - sizes
    # logarithms of numbers below 2**53 are exact enough in float64
    exponents = torch.log2(sizes.double()).ceil().long()
    for exponent in sorted(set(exponents.tolist())):
        places = torch.arange(1 << exponent)
        for alike in torch.split(torch.nonzero(exponents == exponent).flatten(), max(1, _MOST_ROWS >> exponent)):
            first, last = begins[alike], sizes[alike, None] - 1
            rows = adapted[first[:, None] + torch.minimum(places, last)]
            yield Batch(pairs[first], slots[first], rows, places <= last if exponent else None)


def _each(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Each row times its expert's weights, (experts, out, in); ``experts`` are sorted."""
    out = x.new_empty(x.shape[0], weights.shape[1])
    found, sizes = torch.unique_consecutive(experts, return_counts=True)
    begin = 0
    for expert, size in zip(found.tolist(), sizes.tolist(), strict=True):
        torch.mm(x[begin : begin + size], weights[expert].T, out=out[begin : begin + size])
        begin += size
    return out


def _add(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, batches: list[Batch]) -> None:
    """Add each row's product of its slot's factors.

    ``a`` is (slots, experts, rank, in), ``b`` (slots, experts, out, rank). What all experts share is held once.
    """
    for batch in batches:
        first, second = (
            stack.flatten(0, 1).index_select(0, batch.slots if stack.shape[1] == 1 else batch.pairs).float().mT
            for stack in (a, b)
        )
        rows = batch.rows.flatten()
        given = x.index_select(0, rows).float().view(*batch.rows.shape, -1)
        product = torch.bmm(torch.bmm(given, first), second).flatten(0, 1)
        if batch.real is not None:
            real = batch.real.flatten()
            rows, product = rows[real], product[real]
        y.index_add_(0, rows, product.to(y.dtype))
