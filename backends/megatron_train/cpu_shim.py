"""Makes megatron-core run without CUDA. A rank on CUDA never imports this module.

Megatron asks ``torch.cuda`` for the current device, streams and random states even where it would work on any device.
Installed once, before a model is built; what it replaces is replaced for the whole process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")


class _Event:
    def synchronize(self) -> None:
        """Nothing runs behind our back on a CPU."""


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        """As with an event."""

    def wait_stream(self, _: Any) -> None:
        """As with an event."""

    def record_event(self, *_: Any) -> _Event:
        return _Event()


class _OnCpu:
    """Stands for the module ``torch`` where Megatron's schedules say ``device="cuda"`` literally."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("device") == "cuda":
            options["device"] = _CPU
        return torch.zeros(*size, **options)


def install() -> None:
    """Replace what needs CUDA by what does the same on a CPU."""
    _replace_torch_cuda()
    _replace_in_megatron()


def _replace_torch_cuda() -> None:
    only = _Stream()

    @contextlib.contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *_: None
    cuda.Stream = _Stream
    cuda.current_stream = lambda *_: only
    cuda.stream = stream
    cuda.get_rng_state = lambda *_: torch.default_generator.get_state()
    # torch.manual_seed would call this function again
    cuda.manual_seed = torch.default_generator.manual_seed


def _replace_in_megatron() -> None:
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.default_generator.set_state(state)

    def to_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    replaced: Any = random
    replaced._get_cuda_rng_state = get_state
    replaced._set_cuda_rng_state = set_state
    replaced = token_dispatcher
    replaced.maybe_move_tensor_to_cpu = to_cpu
    replaced = schedules
    replaced.torch = _OnCpu()
