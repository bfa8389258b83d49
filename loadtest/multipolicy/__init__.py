"""k policies of GRPO's shape on one resident base, one after another and at once: wall time and peak memory.

Every policy samples, trains and publishes through a whole mesh: gateway, registrar, sidecar, a real vLLM, the training
service and its trainer, on one host and one GPU. The two ways take turns, with fresh policies each time, which stay
until their turn is over in both. Then, on a trainer of its own, 50 policies of mixed rank (``residents.py``).
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from backends.interface import EngineSettings
from backends.vllm.command import device_of
from loadtest.report import environment, write_report
from loadtest.training.bases import RANK, TrainedBase, make_base
from loadtest.training.client import TrainingClient
from loadtest.training.memory import PeakMemory
from loadtest.training.mesh import TrainingMesh, engine_options, trainer_options

from .grpo import Shape, Step, train
from .residents import Residents, Size
from .residents import measure as measure_residents

Say = Callable[[str], object]


class Plan(msgspec.Struct, frozen=True):
    """``policies`` of ``shape``, in ``rounds`` of both ways."""

    policies: int
    rounds: int
    shape: Shape
    residents: Size


PLANS = {
    ("cpu", "small"): Plan(3, 1, Shape(2, 4, 16, 16, 2, RANK), Size(49, 2, 64, 5, 2)),
    ("cpu", "full"): Plan(3, 3, Shape(2, 4, 32, 32, 3, RANK), Size(49, 4, 64, 9, 3)),
    ("cuda", "small"): Plan(3, 1, Shape(8, 8, 64, 256, 3, RANK), Size(49, 16, 256, 9, 2)),
    ("cuda", "full"): Plan(3, 3, Shape(8, 8, 64, 256, 3, RANK), Size(49, 64, 256, 9, 3)),
}
SLOTS = 8


class Way(msgspec.Struct, frozen=True):
    """One way's turn: seconds from the first policy's beginning to the last one's end, each policy's steps, and the
    most memory (bytes) that the mesh's processes and the GPU had."""

    wall_s: float
    steps: list[list[Step]]
    host_peak: int
    device_peak: int


class Measured(msgspec.Struct):
    """By round."""

    sequential: list[Way] = []
    concurrent: list[Way] = []
    residents: Residents | None = None

    def summary(self, policies: int) -> dict[str, float]:
        told: dict[str, float] = {"policies": policies}
        pairs = list(zip(self.sequential, self.concurrent, strict=False))
        if pairs:
            told |= {
                "sequential_s": round(statistics.median(one.wall_s for one, _ in pairs), 2),
                "concurrent_s": round(statistics.median(other.wall_s for _, other in pairs), 2),
                "speedup": round(statistics.median(one.wall_s / other.wall_s for one, other in pairs), 3),
                "peak_memory_ratio": _ratio(*pairs[0], "device_peak" if pairs[0][0].device_peak else "host_peak"),
                "peak_host_memory_ratio": _ratio(*pairs[0], "host_peak"),
            }
        return told | (self.residents.summary() if self.residents is not None else {})


def _ratio(sequential: Way, concurrent: Way, field: str) -> float:
    """Of the first round: an allocator keeps what it once had, so that the ways are alike in later ones."""
    return round(float(getattr(concurrent, field)) / float(getattr(sequential, field)), 4)


def run(
    file: Path, *, small: bool, seed: int, device: str = "auto", plot: Path | None = None,
    say: Say = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Measure and write the report; returns the summary."""
    device = device_of(EngineSettings(name="multipolicy", base="", fingerprint="", device=device))
    with tempfile.TemporaryDirectory(prefix="roost-loadtest-") as scratch:
        root = Path(scratch)
        say("Making the base")
        base = make_base(device, root / "base", seed)
        bench = Bench(file, base, PLANS[device, "small" if small else "full"], seed=seed, say=say)
        say("Starting the mesh")
        with TrainingMesh(root / "mesh", base, slots=SLOTS) as mesh:
            bench.both_ways(mesh)
        summary = bench.residents(root / "residents")
    if plot is not None:
        from .picture import draw

        draw(plot, bench.found, base.name)
    return summary


class Bench:
    """The parts, each of which writes the report with what is known by then."""

    def __init__(self, file: Path, base: TrainedBase, plan: Plan, *, seed: int, say: Say) -> None:
        self.found = Measured()
        self._file = file
        self._base = base
        self._plan = plan
        self._seed = seed
        self._say = say
        self._told = environment(seed=seed, engine="vllm", stand_in=base.stand_in) | {
            "base": base.name, "device": base.device, "plan": msgspec.to_builtins(plan),
        }  # fmt: skip
        if base.device == "cuda":
            self._told["gpu_shared_by"] = "MPS" if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else "time slices"
            self._told["lora_kernels"] = "tuned" if os.environ.get("VLLM_TUNED_CONFIG_FOLDER") else "as vLLM has them"
            self._told["engine_arguments"] = engine_options(base)["extra_args"]

    def both_ways(self, mesh: TrainingMesh) -> dict[str, Any]:
        """Over a mesh that runs."""
        asyncio.run(_Ways(mesh, self._plan, self._seed, self._say, self._write).run(self.found))
        return self._write()

    def residents(self, root: Path) -> dict[str, Any]:
        """On a trainer of their own, with its files in ``root``."""
        self._say(f"{self._plan.residents.others + 1} policies on one trainer")
        options = trainer_options(self._base)
        found = measure_residents(self._base, root, self._plan.residents, options, self._seed)
        self.found.residents = asyncio.run(found)
        return self._write()

    def _write(self) -> dict[str, Any]:
        summary = self.found.summary(self._plan.policies)
        write_report(self._file, self._told, msgspec.to_builtins(self.found), summary)
        return summary


class _Ways:
    def __init__(self, mesh: TrainingMesh, plan: Plan, seed: int, say: Say, write: Callable[[], object]) -> None:
        self._mesh = mesh
        self._plan = plan
        self._seed = seed
        self._say = say
        self._write = write
        self._made = 0

    async def run(self, found: Measured) -> None:
        client = TrainingClient(self._mesh.url)
        try:
            self._say("Warming up")
            # both ways: an engine compiles kernels for batches of a size that it has not had
            await self._turn(client, policies=1, steps=1, at_once=False)
            await self._turn(client, self._plan.policies, steps=1, at_once=True)
            for number in range(self._plan.rounds):
                for at_once, ways in ((False, found.sequential), (True, found.concurrent)):
                    self._say(f"Round {number + 1}: {'at once' if at_once else 'one after another'}")
                    steps = self._plan.shape.steps
                    ways.append(await self._turn(client, self._plan.policies, steps, at_once=at_once))
                    self._say(f"  {ways[-1].wall_s:.1f} s")
                    self._write()
        finally:
            await client.close()

    async def _turn(self, client: TrainingClient, policies: int, steps: int, *, at_once: bool) -> Way:
        shape = msgspec.structs.replace(self._plan.shape, steps=steps)
        names = [f"learner-{self._made + place}" for place in range(policies)]
        seeds = [self._seed + self._made + place for place in range(policies)]
        self._made += policies
        roots = await asyncio.to_thread(self._mesh.pids)
        with PeakMemory(roots.values(), gpu=self._mesh.base.device == "cuda") as peak:
            begun = time.monotonic()
            each = [
                train(client, name, shape, seed=seed, vocabulary=self._mesh.base.vocabulary, start=begun)
                for name, seed in zip(names, seeds, strict=True)
            ]
            done = await asyncio.gather(*each) if at_once else [await one for one in each]
            wall_s = time.monotonic() - begun
        for run, _ in done:
            await run.finish()
        return Way(wall_s, [taken for _, taken in done], peak.host, peak.device)
