"""vLLM's LoRA kernels on this machine's GPU, over configurations, beside the one that vLLM takes by itself.

A kernel adds an adapter's part to a module's output in two calls: shrink, from the module's input to the rank, and
expand, from there to its output. How fast each is depends on how its work is cut into blocks. vLLM reads that from
files, where it is given any for the GPU (``tuned_files``), and has one way for all GPUs and shapes else. Default and
candidates take turns round by round; the figures are of rounds after those that the choice was made by.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from backends.vllm.command import rank_limit
from loadtest.report import environment, write_report
from wire.outcomes import InvalidRequest

from .choosing import WORTH, Launches, measure, summary
from .configurations import candidates
from .shapes import Work, adapters_in, launched_for, read_work
from .tuned_files import Entry, write_files

# vLLM takes the nearest: what is chosen for one size serves all up to the middle of the way to the next
TOKENS = (16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
FOLDER_VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"
_MOST_WORKERS = 16
_STAND_IN = {
    "adapters": "drawn at random, one in each slot",
    "batch": "an adapter for each 64 tokens, which take turns among them",
    "engine": "none: the kernels are called one at a time, each again and again on the same tensors",
}


def run(
    file: Path,
    *,
    model: Path,
    rank: int = 32,
    slots: int = 8,
    tokens: Sequence[int] = TOKENS,
    specialised: bool = False,
    seed: int = 1,
    configs: Path | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Measure and write the report; returns the summary.

    ``model``: a ``config.json`` or the folder of one. ``slots``: the engine's; ``rank``: of what they hold,
    rounded up as vLLM does.
    ``specialised``: choose for an engine that is told ``--specialize-active-lora``. ``configs``: a folder for the files
    that vLLM reads. It starts processes, so a script that calls it does so under ``if __name__ == "__main__"``. Raises
    RoostError.
    """
    tokens = sorted(set(tokens))
    if not tokens or min(rank, slots, *tokens) < 1:
        raise InvalidRequest("rank, slots and tokens are numbers above 0", field="tokens")
    rank = rank_limit(rank)
    work = read_work(model)
    kernels = _kernels()
    engine = kernels.Engine(slots, rank, seed)
    workers = min(_MOST_WORKERS, os.cpu_count() or 1)
    say(f"Compiling in {workers} processes")
    if not kernels.compile_all(_jobs(kernels, engine, work, tokens), workers):
        say("A process that compiled has died: what is left is compiled while it is measured")
    measured = []
    for kernel in work.calls:
        say(f"{kernel.op.capitalize()} of {', '.join(map(str, kernel.widths))}")
        for one in tokens:
            adapters = adapters_in(one, slots)
            every, active = (launched_for(adapters, slots, specialised=choice) for choice in (False, True))
            batch = kernels.GpuBatch(engine, kernel, one, adapters)
            launches = Launches(every, active, specialised)
            measured.append(measure(batch, kernel, one, launches, candidates(kernel.op, rank)))
    figures = summary(work, measured)
    gpu = kernels.torch.cuda.get_device_name()
    if configs is not None:
        entries = [Entry(one.kernel.op, one.kernel.slices, one.tokens, one.kernel.width, one.tuned) for one in measured]
        for path in write_files(configs, gpu, slots, rank, entries, functools.partial(kernels.default_of, engine)):
            say(f"Written to {path}")
    folder = model if model.is_dir() else model.parent
    told = {
        "accelerator": gpu, "model": folder.resolve().name, "rank": rank, "slots": slots, "specialised": specialised,
        "worth": WORTH,
    }  # fmt: skip
    samples = {f"{one.kernel}_at_{one.tokens}": one.told() for one in measured}
    write_report(file, environment(seed=seed, engine="vllm", stand_in=_STAND_IN) | told, samples, figures)
    return figures


def _jobs(kernels: ModuleType, engine: Any, work: Work, tokens: Sequence[int]) -> list[Any]:
    """Everything that is going to run. Triton compiles one kernel for all multiples of 16, and another for the rest."""
    some = tuple({(one == 1, one % 16 == 0): one for one in reversed(tokens)}.values())
    jobs = []
    for kernel in work.calls:
        jobs.append(kernels.Job(engine, kernel, None, tuple(tokens)))
        jobs += [kernels.Job(engine, kernel, one, some) for one in candidates(kernel.op, engine.rank)]
    return jobs


def _kernels() -> ModuleType:
    """The module that runs them. Raises InvalidRequest where it can't."""
    what = "this measures vLLM's LoRA kernels on a CUDA GPU"
    try:
        import torch
    except ImportError:
        raise InvalidRequest(f"{what}, and there is no torch: pip install 'roost[vllm]'", field="engine") from None
    if not torch.cuda.is_available():
        raise InvalidRequest(f"{what}, and there is no CUDA device here", field="device")
    if importlib.util.find_spec("vllm") is None:
        raise InvalidRequest(f"{what}, and there is no vLLM: pip install 'roost[vllm]'", field="engine")
    if os.environ.get(FOLDER_VARIABLE):
        raise InvalidRequest(f"with {FOLDER_VARIABLE} set vLLM's default can't be measured: unset it", field="engine")
    # each process would warn that no folder is named
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from . import kernels

        kernels.check_kernels()
    except (ImportError, AttributeError, TypeError) as error:
        raise InvalidRequest(f"{what}, and the vLLM here has not those of vllm 0.22: {error}", field="engine") from None
    return kernels
