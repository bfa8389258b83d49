"""Inside the engine: installs as a worker does them, the bits in the slots, and the tokens that they answer.

``Measuring`` is mixed into the workers of the server under test. Answers are compared in an engine of their own, within
one process (``python -m loadtest.install.inside JOB OUT``), where a batch is the same each time. The stock way is
vLLM's own ``add_adapter`` from a PEFT folder, in the same engine and in turn with ours.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from backends.extent_path import ExtentPath
from backends.vllm.terms import PENDING

from .adapters import Adapter
from .bases import CONTEXT, SLOTS
from .figures import Round, Rounds
from .jobs import Answered, Grid, Job, Measure, Measured

_PROMPT = list(range(2, 18))
_TOKENS = 24
# what neither way may leave in a slot
_POISON = 7
_FLOORS = 9
# adapters whose slots are compared
_COMPARED = 2


class Measuring:
    """A worker's extension (vLLM's ``--worker-extension-cls``)."""

    def roost_loadtest_measure(self, measure: str) -> str:
        """See ``jobs.MEASURE``."""
        return msgspec.json.encode(_Worker(self).measure(msgspec.json.decode(measure, type=Measure))).decode()


def run(job: Job) -> Answered:
    """Start an engine and compare. The environment must be that of an engine with our plug-in, in one process."""
    from vllm import LLM

    if job.device == "cuda":
        from vllm.lora.ops.triton_ops import utils

        # dense kernels add up parts of a row in any order otherwise: no two answers need be the same
        utils.is_batch_invariant = True
    memory = {"kv_cache_memory_bytes": 1 << 30} if job.device == "cpu" else {"gpu_memory_utilization": 0.92}
    engine = LLM(
        model=job.model, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
        max_model_len=CONTEXT, max_num_seqs=SLOTS + 1, enable_lora=True, max_loras=SLOTS, max_cpu_loras=2 * SLOTS,
        max_lora_rank=job.slot_rank, enable_prefix_caching=False, seed=job.seed, **memory,
    )  # fmt: skip
    [problem] = engine.collective_rpc("roost_prepare")
    if problem:
        raise RuntimeError(problem)
    return _compare_tokens(engine, job.adapters)


class _Worker:
    """One worker: installs and removes adapters by either way, a new id for each."""

    _last_id = 0

    def __init__(self, worker: Any) -> None:
        from vllm.lora.request import LoRARequest

        self._worker = worker
        self._request = LoRARequest
        self.manager = worker.model_runner.lora_manager
        self._wait: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def measure(self, measure: Measure) -> Measured:
        adapters = measure.adapters
        # the first of each way compiles, maps and brings files into memory
        self.remove([self.ours(*adapters[0])])
        wait_until_pinned = getattr(self._writer, "wait_until_pinned", None)
        if wait_until_pinned is not None:
            wait_until_pinned()
        equal = all(self._equal(*one) for one in adapters[:_COMPARED])
        rounds = self._rounds(adapters, measure.worker or Grid({}, 0))
        accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        return Measured(measure.rank, rounds, self._floor_ms(adapters[0][1]), equal, accelerator=accelerator)

    def _rounds(self, adapters: list[tuple[str, Adapter]], grid: Grid) -> Rounds:
        rounds = Rounds()
        for _ in range(max(1, grid.stock)):
            for n, ours in sorted(grid.ours.items()):
                rounds.ours.append([self._round(self.ours, adapters[:n]) for _ in range(ours)])
            if grid.stock:
                rounds.stock.append(self._round(self.stock, adapters))
        return rounds

    def ours(self, name: str, adapter: Adapter) -> Any:
        """Returns the request once the adapter is in its slot. Raises RuntimeError."""
        extent = adapter.extent
        path = ExtentPath(adapter.segment, extent.offset, extent.length, extent.generation, adapter.digest)
        request = self._named(name, str(path))
        answer = self._worker.roost_add_lora(request)
        while answer == PENDING:
            answer = self._worker.roost_finish_lora(request.lora_int_id, False)
        if answer:
            raise RuntimeError(answer)
        return request

    def stock(self, name: str, adapter: Adapter) -> Any:
        request = self._named(name, adapter.folder)
        self.manager.add_adapter(request)
        self._wait()
        return request

    def remove(self, requests: list[Any]) -> None:
        for request in requests:
            self.manager.remove_adapter(request.lora_int_id)

    def _named(self, name: str, path: str) -> Any:
        _Worker._last_id += 1
        return self._request(name, _Worker._last_id, path)

    def _round(self, way: Callable[[str, Adapter], Any], adapters: list[tuple[str, Adapter]]) -> Round:
        self._wait()
        requests, each = [], []
        begun = time.perf_counter()
        for one in adapters:
            before = time.perf_counter()
            requests.append(way(*one))
            each.append((time.perf_counter() - before) * 1e3)
        total = time.perf_counter() - begun
        self.remove(requests)
        return Round(len(adapters), [round(ms, 4) for ms in each], round(total, 6))

    def _equal(self, name: str, adapter: Adapter) -> bool:
        """Whether both ways leave the same bits in a slot, ours after other bits were in it."""
        stock = self.stock(name, adapter)
        index = self.manager._adapter_manager.lora_index_to_id.index
        theirs = index(stock.lora_int_id)
        for tensor in self._stacked():
            tensor[index(None)] = _POISON
        ours = self.ours(name, adapter)
        mine = index(ours.lora_int_id)
        differ = [tensor[mine].ne(tensor[theirs]).any() for tensor in self._stacked()]
        self.remove([stock, ours])
        return not bool(torch.stack(differ).any())

    def _stacked(self) -> list[torch.Tensor]:
        """Every tensor with a place a slot, of every wrapped module."""
        found: list[torch.Tensor] = []
        for module in self.manager._adapter_manager.modules.values():
            stacked = [vars(module)[name] for name in vars(module) if name.startswith("w") and name.endswith("stacked")]
            for tensors in stacked or [module.lora_a_stacked, module.lora_b_stacked]:
                found.extend([tensors] if isinstance(tensors, torch.Tensor) else tensors)
            if stacked:
                found.append(module.adapter_enabled)
        return found

    @property
    def _writer(self) -> Any:
        return self._worker.roost_installer._writer

    def _floor_ms(self, adapter: Adapter) -> float:
        """As many bytes as the adapter's numbers, from pinned memory to memory of the device that was there before."""
        size = adapter.extent.length - adapter.data_start
        source = torch.ones(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        target = torch.empty_like(source, device=self.manager.device).fill_(1)
        times = []
        for _ in range(_FLOORS):
            self._wait()
            before = time.perf_counter()
            target.copy_(source, non_blocking=True)
            self._wait()
            times.append((time.perf_counter() - before) * 1e3)
        return round(statistics.median(times), 4)


def _compare_tokens(engine: Any, adapters: list[tuple[str, Adapter]]) -> Answered:
    """One batch of all adapters, loaded either way; those of the stock way are asked twice."""
    from backends.vllm.core import adapters_of

    core = engine.llm_engine.engine_core.engine_core

    def answers(stock: bool, times: int) -> list[list[list[int]]]:
        [requests] = engine.collective_rpc(lambda worker: _load(_Worker(worker), adapters, stock))
        adapters_of(core).update({one.lora_int_id: one.lora_name for one in requests})
        told = [_generate(engine, requests) for _ in range(times)]
        for one in requests:
            adapters_of(core).pop(one.lora_int_id)
        engine.collective_rpc(lambda worker: _Worker(worker).remove(requests))
        return told

    stock, again = answers(True, 2)
    (ours,) = answers(False, 1)
    return Answered(ours == stock if stock == again else None, len({tuple(one) for one in stock}))


def _load(worker: _Worker, adapters: list[tuple[str, Adapter]], stock: bool) -> list[Any]:
    return [(worker.stock if stock else worker.ours)(*one) for one in adapters]


def _generate(engine: Any, requests: list[Any]) -> list[list[int]]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": _PROMPT}] * len(requests)
    outputs = engine.generate(prompts, parameters, lora_request=requests, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    job, out = map(Path, sys.argv[1:])
    out.write_bytes(msgspec.json.encode(run(msgspec.json.decode(job.read_bytes(), type=Job))))
