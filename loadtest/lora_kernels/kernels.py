"""vLLM's own LoRA kernels on this machine's GPU. To import this is to import torch and vLLM."""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch
from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.ops.triton_ops.utils import get_lora_op_configs

from .configurations import Configuration
from .shapes import Kernel

_CALLS_A_GRAPH, _REPLAYS = 10, 5
# relative, of bf16 sums in another order
_TOLERANCE = 1e-2
_SPREAD = 0.02
_MODULES: dict[str, Any] = {"shrink": lora_shrink_op, "expand": lora_expand_op}
# tensors of a batch that vLLM's metadata hands to a kernel; the last is for how many adapters it is launched
_META = 7


class Engine(NamedTuple):
    """What an engine has been told: its slots, and the rank that they hold."""

    slots: int
    rank: int
    seed: int = 1
    device: str = "cuda"


class Job(NamedTuple):
    """A configuration to compile, or None for vLLM's own, for batches of so many tokens."""

    engine: Engine
    kernel: Kernel
    configuration: Configuration | None
    tokens: tuple[int, ...]


def check_kernels() -> None:
    """Raises AttributeError or TypeError where this vLLM's kernels are called otherwise than here."""
    inspect.signature(lora_shrink_op._lora_shrink).bind(*range(3 + _META + 1))
    inspect.signature(lora_expand_op._lora_expand).bind(*range(3 + _META + 2))
    inspect.signature(LoRAKernelMeta.make).bind(*range(3))
    inspect.signature(LoRAKernelMeta.meta_args).bind(*range(3))
    for module in _MODULES.values():
        inspect.signature(module.get_lora_op_configs)
    default_of(Engine(1, 16), "shrink", 1, 16, 1024)


def default_of(engine: Engine, op: str, slices: int, tokens: int, width: int) -> Configuration:
    """What vLLM takes when no folder is named."""
    adding = {"add_inputs": True} if op == "expand" else {}
    found = get_lora_op_configs(
        op, max_loras=engine.slots + 1, batch=tokens, hidden_size=width, rank=engine.rank, num_slices=slices, **adding
    )
    return dict(found)


class GpuBatch:
    """One kernel, with adapters in all slots and a batch of so many tokens, which take turns among ``adapters``."""

    def __init__(self, engine: Engine, kernel: Kernel, tokens: int, adapters: int) -> None:
        self._engine, self._kernel, self._tokens = engine, kernel, tokens
        self._weights = _weights(engine, kernel)
        self._inputs, self.output = _activations(engine, kernel, tokens)
        turns = torch.arange(tokens, device=engine.device, dtype=torch.int32) % adapters
        meta = LoRAKernelMeta.make(engine.slots, tokens, engine.device)
        meta.prepare_tensors(turns)
        self._meta = meta.meta_args(tokens, True)[: _META - 1]
        self._expected: torch.Tensor | None = None

    def default(self) -> Configuration:
        return default_of(self._engine, self._kernel.op, self._kernel.slices, self._tokens, self._kernel.width)

    def fault(self, configuration: Configuration) -> str | None:
        if self._expected is None:
            self._expected = self._once(self.default())
        try:
            found = self._once(configuration)
        # the compiler, the launch and the device each have errors of their own
        except Exception as error:
            return (str(error) or repr(error)).strip().splitlines()[0][:200]
        away = float((found - self._expected).norm() / self._expected.norm())
        return None if away <= _TOLERANCE else f"its output is {away:.3g} of its size away from the default's"

    def timer(self, configuration: Configuration, launched: int) -> Callable[[], float]:
        with _told(self._kernel.op, configuration):
            call = self._call(launched)
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(_CALLS_A_GRAPH):
                    call()
        return functools.partial(_replayed_us, graph)

    def run(self, configuration: Configuration) -> None:
        """Call the kernel once, and wait for nothing."""
        with _told(self._kernel.op, configuration):
            self._call(self._engine.slots + 1)()

    def _once(self, configuration: Configuration) -> torch.Tensor:
        """The output of a call that had nothing to add to."""
        self.output.zero_()
        self.run(configuration)
        return self.output.to(torch.float32, copy=True)

    def _call(self, launched: int) -> Callable[[], None]:
        count = torch.tensor([launched], dtype=torch.int32)
        operands = (self._inputs, self._weights, self.output, *self._meta, count)
        if self._kernel.op == "shrink":
            return lambda: lora_shrink_op._lora_shrink(*operands, 1.0)
        return lambda: lora_expand_op._lora_expand(*operands, 0, True)


def compile_all(jobs: Sequence[Job], workers: int) -> bool:
    """Compile in so many processes, which leave what they made in Triton's cache on disk; False where one has died.

    What can't be compiled is told by ``GpuBatch.fault``: nothing is raised for it here.
    """
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        try:
            list(pool.map(_compile, jobs))
        except BrokenProcessPool:
            return False
    return True


def _compile(job: Job) -> None:
    for tokens in job.tokens:
        with contextlib.suppress(Exception):
            batch = GpuBatch(job.engine, job.kernel, tokens, adapters=1)
            batch.run(batch.default() if job.configuration is None else job.configuration)
            torch.cuda.synchronize()


# kept for good: vLLM remembers strides by address, which must not be used again for other weights
@functools.cache
def _weights(engine: Engine, kernel: Kernel) -> list[torch.Tensor]:
    chance = _chance(engine)
    shapes = [(engine.rank, width) if kernel.op == "shrink" else (width, engine.rank) for width in kernel.widths]
    return [
        torch.randn(engine.slots, 1, *shape, generator=chance, dtype=torch.bfloat16, device=engine.device) * _SPREAD
        for shape in shapes
    ]


def _activations(engine: Engine, kernel: Kernel, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and output; what is between shrink and expand is float32."""
    device, chance = engine.device, _chance(engine)
    between = (kernel.slices, tokens, engine.rank)
    if kernel.op == "shrink":
        inputs = torch.randn(tokens, kernel.width, generator=chance, dtype=torch.bfloat16, device=device)
        return inputs, torch.zeros(between, device=device)
    output = torch.zeros(tokens, sum(kernel.widths), dtype=torch.bfloat16, device=device)
    return torch.randn(between, generator=chance, device=device), output


def _chance(engine: Engine) -> torch.Generator:
    return torch.Generator(engine.device).manual_seed(engine.seed)


@contextlib.contextmanager
def _told(op: str, configuration: Configuration) -> Iterator[None]:
    """Calls of the kernel take this configuration."""
    module = _MODULES[op]
    asked = module.get_lora_op_configs
    module.get_lora_op_configs = lambda *_, **__: configuration
    try:
        yield
    finally:
        module.get_lora_op_configs = asked


def _replayed_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a call: the median of a few replays."""
    found: list[float] = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / _CALLS_A_GRAPH)
    return statistics.median(found)
