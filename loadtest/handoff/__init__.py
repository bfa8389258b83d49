"""From the call that saves what was trained to the first token of it, through a whole mesh; beside the stock way, which
merges the adapter into the weights and has an engine load them.

A handoff follows a step of training. The old revision is being served, as in a loop of reinforcement learning: its
first tokens, asked for just before, are the warm ones. The stock way begins with the adapter's file as it lies in the
store, and its merger has the base's weights in memory already.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from backends.interface import EngineSettings
from backends.vllm.command import device_of
from catalog.artifacts import open_store
from loadtest.report import environment, write_report
from loadtest.training.bases import RANK, make_base
from loadtest.training.client import TrainingClient
from loadtest.training.mesh import NAME, TrainingMesh
from wire.outcomes import EngineFailed

from .merged import MergingEngine, Reload
from .taught import POLICY, PROMPT, Handoff, Taught

_SLOTS = 4

Say = Callable[[str], object]


class Plan(msgspec.Struct, frozen=True):
    """``handoffs`` of ours to a round, and a merge with each way of loading it."""

    rounds: int
    handoffs: int


FULL, SMALL = Plan(5, 10), Plan(2, 5)


class Measured(msgspec.Struct):
    """By round. ``in_place`` has no entries where the engine can't reload its weights, and ``refused`` says why."""

    handoffs: list[list[Handoff]] = []
    restarts: list[Reload] = []
    in_place: list[Reload] = []
    refused: str = ""

    def summary(self) -> dict[str, float]:
        each = [one for round_ in self.handoffs for one in round_]
        ours = [statistics.median(one.total_s for one in round_) for round_ in self.handoffs]
        told = {
            "publish_to_first_token_s": statistics.median(one.total_s for one in each),
            "warm_first_token_s": statistics.median(warm for one in each for warm in one.warm_s),
            "first_token_extra_s": statistics.median(one.extra_s for one in each),
            "first_token_extra_max_s": max(one.extra_s for one in each),
            "save_s": statistics.median(one.save_s for one in each),
            "sample_extra_s": statistics.median(one.save_s + one.sample_s - one.warm_sample_s for one in each),
        }
        for stage in each[0].stages:
            told[f"stage_{stage}"] = statistics.median(one.stages[stage] for one in each)
        for name, ratio, reloads in (
            ("merge_reload_s", "merge_over_ours", self.restarts),
            ("merge_reload_in_place_s", "merge_in_place_over_ours", self.in_place),
        ):
            if reloads:
                told[name] = statistics.median(one.total_s for one in reloads)
                pairs = zip(reloads, ours, strict=False)
                told[ratio] = statistics.median(one.total_s / other for one, other in pairs)
        return {name: round(value, 4) for name, value in told.items()}


def run(
    file: Path, *, small: bool, seed: int, device: str = "auto", plot: Path | None = None,
    say: Say = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Measure and write the report; returns the summary."""
    device = device_of(EngineSettings(name="handoff", base="", fingerprint="", device=device))
    with tempfile.TemporaryDirectory(prefix="roost-loadtest-") as scratch:
        root = Path(scratch)
        say("Making the base")
        base = make_base(device, root / "base", seed)
        say("Starting the mesh and a stock engine")
        with MergingEngine(root / "merged", base) as stock, TrainingMesh(root / "mesh", base, slots=_SLOTS) as mesh:
            return measure(file, mesh, stock, SMALL if small else FULL, seed=seed, plot=plot, say=say)


def measure(
    file: Path, mesh: TrainingMesh, stock: MergingEngine, plan: Plan, *, seed: int, plot: Path | None = None, say: Say
) -> dict[str, Any]:
    """The same over what runs already. The report grows with each round."""
    bench = _Bench(file, mesh, stock, plan, seed, say)
    summary = asyncio.run(bench.run())
    if plot is not None:
        from .picture import draw

        draw(plot, bench.found, mesh.base.name)
    return summary


class _Bench:
    def __init__(self, file: Path, mesh: TrainingMesh, stock: MergingEngine, plan: Plan, seed: int, say: Say) -> None:
        self.found = Measured()
        self._file = file
        self._mesh = mesh
        self._plan = plan
        self._seed = seed
        self._say = say
        self._stock = stock
        self._chance = np.random.default_rng(seed)
        self._told = environment(seed=seed, engine="vllm", stand_in=mesh.base.stand_in) | {
            "base": mesh.base.name, "device": mesh.base.device, "rank": RANK,
        }  # fmt: skip

    async def run(self) -> dict[str, Any]:
        client = TrainingClient(self._mesh.url)
        try:
            taught = Taught(self._mesh, await client.begin(NAME, POLICY, rank=RANK, seed=1), self._prompt)
            self._say("Warming up")
            for _ in range(2):
                await taught.hand_off()
            with await self._revision(taught) as revision:
                await self._stock.ready(revision, self._prompt(PROMPT))
            for number in range(self._plan.rounds):
                self._say(f"Round {number + 1}: {self._plan.handoffs} handoffs")
                self.found.handoffs.append([await taught.hand_off() for _ in range(self._plan.handoffs)])
                self._write()
                await self._merge(taught)
                self._write()
        finally:
            await client.close()
        return self.found.summary()

    async def _revision(self, taught: Taught) -> AbstractContextManager[Path]:
        """The file of what was handed off last."""
        digest = await asyncio.to_thread(taught.newest)
        return open_store(self._mesh.state / "store").as_file(digest)

    async def _merge(self, taught: Taught) -> None:
        with await self._revision(taught) as revision:
            if not self.found.refused:
                self._say("Merged, and loaded where the engine is")
                try:
                    self.found.in_place.append(await self._stock.reload(revision, self._prompt(PROMPT)))
                except EngineFailed as error:
                    self.found.refused = error.message
                self._write()
            self._say("Merged, and loaded by an engine in its place")
            self.found.restarts.append(await self._stock.restart(revision, self._prompt(PROMPT)))

    def _write(self) -> None:
        samples = msgspec.to_builtins(self.found)
        write_report(self._file, self._told, samples, self.found.summary())

    def _prompt(self, length: int) -> list[int]:
        return [int(token) for token in self._chance.integers(0, self._mesh.base.vocabulary, length)]
