"""Inside a worker on CPU: tokens of the base get no adapter, whoever they are batched with.

vLLM marks them with index -1. Its CUDA kernels return at once for it and leave such rows as they are; its torch ones
index with it, which counts from the end: the base would answer as the adapter in the last slot does, and what was
computed so would stay in the prefix cache under the base's name.

The logits of a prompt, which a request may ask for, are computed with the indices of the batch's last tokens: as many
rows as the prompt has against as many indices as there are requests. The torch kernels end the engine over that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.lora.ops import torch_ops
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

from . import versions

Kernel = Callable[..., None]

# the sgmv kernels, of prefill, spread their indices over the tokens and call these
KERNELS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


def patch() -> None:
    """Replace the kernels wherever vLLM calls them from. Raises UnsupportedVllm."""
    versions.check(versions.CPU_SEAMS)
    for name in KERNELS:
        kernel = skip_the_base(getattr(lora_ops, name))
        for module in (lora_ops, torch_ops, punica_cpu):
            setattr(module, name, kernel)
    versions.check(versions.CPU_LOGITS_SEAMS)
    punica_cpu.PunicaWrapperCPU.add_lora_logits = skip_prompts(punica_cpu.PunicaWrapperCPU.add_lora_logits)
    _check_prefill()


def skip_the_base(stock: Kernel) -> Kernel:
    """``stock`` for rows with an adapter; the others keep their output, bit by bit."""

    @functools.wraps(stock)
    def kernel(
        inputs: torch.Tensor,
        lora_b_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        *rest: int | float | bool,
        **named: int | float | bool,
    ) -> None:
        (adapted,) = torch.nonzero(lora_indices_tensor >= 0, as_tuple=True)
        if adapted.numel() == lora_indices_tensor.numel():
            stock(inputs, lora_b_weights, output_tensor, lora_indices_tensor, *rest, **named)
        elif adapted.numel():
            given, outputs, indices = (x.index_select(0, adapted) for x in (inputs, output_tensor, lora_indices_tensor))
            stock(given, lora_b_weights, outputs, indices, *rest, **named)
            output_tensor.index_copy_(0, adapted, outputs)

    return kernel


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
