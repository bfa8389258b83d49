"""Inside a worker on CPU: tokens of the base get no adapter, whoever they are batched with.

vLLM marks them with index -1. Its CUDA kernels return at once for it and leave such rows as they are; its torch ones
index with it, which counts from the end: the base would answer as the adapter in the last slot does, and what was
computed so would stay in the prefix cache under the base's name.

And a prompt's own logits, for its log-probabilities, get no adapter either: vLLM would pair their rows with the indices
of the requests that are sampled, which ends the engine where these are others in number. No adapter here changes the
head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

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
        adapted = lora_indices_tensor >= 0
        if adapted.all():
            stock(inputs, lora_b_weights, output_tensor, lora_indices_tensor, *rest, **named)
        elif adapted.any():
            outputs = output_tensor[adapted]
            stock(inputs[adapted], lora_b_weights, outputs, lora_indices_tensor[adapted], *rest, **named)
            output_tensor[adapted] = outputs

    return kernel


def skip_prompts(stock: Kernel) -> Kernel:
    """``stock`` where there is an index for each row of hidden states."""

    @functools.wraps(stock)
    def add_lora_logits(
        self: punica_cpu.PunicaWrapperCPU, y: torch.Tensor, x: torch.Tensor, *rest: object, **named: object
    ) -> None:
        if x.view(-1, x.shape[-1]).shape[0] == len(self.sampler_indices):
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
