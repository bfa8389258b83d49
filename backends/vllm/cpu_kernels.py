"""Inside a worker on CPU: tokens of the base get no adapter, and the tokens of one adapter are one matrix product.

vLLM marks tokens of the base with index -1. Its CUDA kernels return at once for it and leave such rows as they are; its
torch ones index with it, which counts from the end: the base would answer as the adapter in the last slot does, and
what was computed so would stay in the prefix cache under the base's name. They also copy an adapter's weights for each
token that has it: a prompt of 64 tokens takes a hundred times as long as one product does.

The logits of a prompt, which a request may ask for, are computed with the indices of the batch's last tokens: as many
rows as the prompt has against as many indices as there are requests. The torch kernels end the engine over that.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from vllm.lora.ops import torch_ops
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

from . import versions

Kernel = Callable[..., None]

_BASE = -1
# rows of one adapter for which a product of their own takes no longer than copies of its weights
_ENOUGH = 6


def patch() -> None:
    """Replace the kernels wherever vLLM calls them from. Raises UnsupportedVllm."""
    versions.check(versions.CPU_SEAMS)
    for name, write in KERNELS.items():
        kernel = by_adapter(getattr(lora_ops, name), write)
        for module in (lora_ops, torch_ops, punica_cpu):
            setattr(module, name, kernel)
    versions.check(versions.CPU_LOGITS_SEAMS)
    punica_cpu.PunicaWrapperCPU.add_lora_logits = skip_prompts(punica_cpu.PunicaWrapperCPU.add_lora_logits)
    _check_prefill()


def by_adapter(stock: Kernel, write: Kernel) -> Kernel:
    """What ``stock`` computes, for rows with an adapter; the others keep their output, bit by bit.

    Rows of one adapter are one product where they are enough, and the rest goes to ``stock``. ``write`` puts a product
    (rows, out) where the kernel's own arguments say. One index alone stands for all rows.
    """

    @functools.wraps(stock)
    def kernel(
        inputs: torch.Tensor,
        lora_b_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        *rest: int | float | bool,
        **named: int | float | bool,
    ) -> None:
        def multiply(slot: int, given: torch.Tensor, outputs: torch.Tensor) -> None:
            weights = lora_b_weights[slot].reshape(lora_b_weights.shape[-2:]).to(outputs.dtype)
            write(given.to(outputs.dtype) @ weights.t(), outputs, *rest, **named)

        counts = Counter(lora_indices_tensor.tolist())
        of_base = counts.pop(_BASE, 0)
        if not of_base and len(counts) == 1:
            multiply(next(iter(counts)), inputs, output_tensor)
            return
        many = [slot for slot, count in counts.items() if count >= _ENOUGH]
        if not of_base and not many:
            stock(inputs, lora_b_weights, output_tensor, lora_indices_tensor, *rest, **named)
            return
        for slot in many:
            rows = (lora_indices_tensor == slot).nonzero().squeeze(1)
            outputs = output_tensor.index_select(0, rows)
            multiply(slot, inputs.index_select(0, rows), outputs)
            output_tensor.index_copy_(0, rows, outputs)
        if len(many) < len(counts):
            few = [slot not in many and slot != _BASE for slot in lora_indices_tensor.tolist()]
            rows = torch.tensor(few).nonzero().squeeze(1)
            given, outputs, indices = (x.index_select(0, rows) for x in (inputs, output_tensor, lora_indices_tensor))
            stock(given, lora_b_weights, outputs, indices, *rest, **named)
            output_tensor.index_copy_(0, rows, outputs)

    return kernel


def _shrink(product: torch.Tensor, outputs: torch.Tensor, scaling: float = 1.0) -> None:
    outputs[:, : product.shape[1]] = scaling * product


def _expand(product: torch.Tensor, outputs: torch.Tensor, add_inputs: bool = True) -> None:
    # adapter and model may be padded to different widths
    width = min(product.shape[1], outputs.shape[1])
    _expand_slice(product[:, :width], outputs, 0, width, add_inputs)


def _expand_slice(
    product: torch.Tensor, outputs: torch.Tensor, slice_offset: int, slice_size: int, add_inputs: bool = True
) -> None:
    where = outputs[: product.shape[0], slice_offset : slice_offset + slice_size]
    if add_inputs:
        where += product
    else:
        where.copy_(product)


# the sgmv kernels, of prefill, spread their indices over the tokens and call these
KERNELS: dict[str, Kernel] = {"bgmv_shrink": _shrink, "bgmv_expand": _expand, "bgmv_expand_slice": _expand_slice}


def skip_prompts(stock: Kernel) -> Kernel:
    """``stock`` where each row has its index, or all have one. Others keep their logits, which no revision adapts."""

    @functools.wraps(stock)
    def add_lora_logits(
        self: punica_cpu.PunicaWrapperCPU, y: torch.Tensor, x: torch.Tensor, *rest: Any, **named: Any
    ) -> None:
        if self.sampler_indices.shape[0] in (1, x.shape[0]):
            stock(self, y, x, *rest, **named)

    return add_lora_logits


def _check_prefill() -> None:
    """Raises UnsupportedVllm where the sgmv kernels work without those that we replaced."""
    weights, indices, lengths = torch.ones(1, 1, 1, 1), torch.tensor([0, -1]), torch.tensor([1, 1])
    about = (torch.tensor([0, 1]), lengths, indices, 2, 1, 2)
    for name, rest in (("sgmv_shrink", (1.0,)), ("sgmv_expand", (True,)), ("sgmv_expand_slice", (0, 1, True))):
        outputs = torch.zeros(2, 1)
        getattr(punica_cpu, name)(torch.ones(2, 1), weights, outputs, *about, *rest)
        if outputs.flatten().tolist() != [1.0, 0.0]:
            raise versions.UnsupportedVllm(f"{name} gives the base an adapter (tried with {versions.TRIED})")
