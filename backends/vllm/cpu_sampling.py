"""Inside a worker on CPU: a request with a seed may be prefilled in pieces.

Of a piece that is not the last, vLLM samples a token too, drops it, and winds the request's generator back by an
offset. Generators on CPU have none, and the call ends the engine: any seed beside enough other prompts would. Here the
generator's state is kept before such a token is sampled and put back after it: the same seed gives the same tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import versions

SEAMS = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample": ("self", "logits", "spec_decode_metadata"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync": (
        "self", "scheduler_output", "sampler_output", "logits", "hidden_states", "num_scheduled_tokens",
    ),
}  # fmt: skip


def patch() -> None:
    """Replace what samples and what winds back. Raises UnsupportedVllm."""
    versions.check(SEAMS)
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner: Any = CPUModelRunner
    runner._sample = keeping_state(runner._sample)
    runner._bookkeeping_sync = without_winding(runner._bookkeeping_sync)


def keeping_state(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``stock``, after which the generators of dropped tokens are as before."""

    @functools.wraps(stock)
    def sample(self: Any, *given: Any, **named: Any) -> Any:
        kept = [(generator, generator.get_state()) for _, generator in _dropped(self)]
        output = stock(self, *given, **named)
        for generator, state in kept:
            generator.set_state(state)
        return output

    return sample


def without_winding(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``stock``, which finds no generators of dropped tokens to wind back."""

    @functools.wraps(stock)
    def bookkeep(self: Any, *given: Any, **named: Any) -> Any:
        generators = self.input_batch.generators
        hidden = {place for place, _ in _dropped(self)}
        self.input_batch.generators = {place: each for place, each in generators.items() if place not in hidden}
        try:
            return stock(self, *given, **named)
        finally:
            self.input_batch.generators = generators

    return bookkeep


def _dropped(runner: Any) -> list[tuple[int, Any]]:
    """Place and generator of each request with a seed whose token of this step is dropped."""
    mask = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
    return [(place, each) for place, each in runner.input_batch.generators.items() if mask[place]]
