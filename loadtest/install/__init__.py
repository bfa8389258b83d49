"""What it costs to have an adapter of every expert in a running engine: ours beside stock vLLM's, in the same engine.

Loads go through the driver and the server's HTTP (``server``), and as calls of the worker in the engine's process
(``inside``), where slots and tokens are compared too. The figures without a word in front are the server's on a CPU and
the worker's on a GPU; the others have ``worker_`` or ``server_`` in front. ``live_`` is through the server while a
stream of the base runs, whose longest gap is told in its usual intervals; such a load takes about two of the stream's
steps, one until the engine comes to the call, and one until it looks whether the transfer is over.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from backends.vllm.command import command_for
from loadtest.report import environment, write_report

from .adapters import Adapters
from .bases import SLOTS, Base, base_for, slot_rank
from .engines import device_of, engine_settings, stand_ins, target_names, version_of
from .figures import named
from .jobs import Job, Measure, Measured, Served
from .server import measure

PARTS = ("worker", "server", "ranks")
_HIGH_RANKS = (16, 32)
_PROCESS_S = 3600.0
# of the adapters whose files were counted tensor by tensor in the published case
_SGLANG_RANKS = (1, 8)


def run(
    file: Path,
    *,
    small: bool,
    seed: int,
    say: Callable[[str], None],
    engine: str = "vllm",
    device: str = "auto",
    parts: Collection[str] = PARTS,
    plot: Path | None = None,
) -> dict[str, Any]:
    """Measure and write the report; returns the summary. ``small`` takes one round of the stock way.

    ``parts``: any of PARTS; ``worker`` and ``server`` are of rank 1, ``ranks`` is 16 and 32 through both. The report is
    written after each, so that a later one that fails costs only itself. Raises RuntimeError.
    """
    base = base_for(device_of(engine, device), engine)
    if engine == "sglang":
        # it has no worker of ours to call
        parts = {part for part in parts if part != "worker"}
    report = _Report(file, engine, base, seed)
    with tempfile.TemporaryDirectory(prefix="roost-loadtest-") as scratch:
        bench = _Bench(Path(scratch), base, engine, seed, small, say, report)
        if {"worker", "server"} & set(parts):
            bench.measure(_SGLANG_RANKS if engine == "sglang" else (1,), parts)
        if "ranks" in parts:
            bench.measure(_HIGH_RANKS, ("server",) if engine == "sglang" else ("worker", "server"))
    if plot is not None:
        from .picture import draw

        draw(plot, report.summary, base.name)
    return report.summary


class _Bench(NamedTuple):
    root: Path
    base: Base
    engine: str
    seed: int
    small: bool
    say: Callable[[str], None]
    report: _Report

    def measure(self, ranks: tuple[int, ...], ways: Collection[str]) -> None:
        """Adapters of all ``ranks`` in one engine, by each of the ways: through a worker, through a server."""
        with ExitStack() as made:
            measures = []
            for rank in ranks:
                self.say(f"Making adapters of rank {rank}")
                targets = target_names(self.engine)
                adapters = made.enter_context(Adapters(self.root, self.base.shape, rank, SLOTS, self.seed, targets))
                measures.append(self._wanted(rank, adapters))
            if "worker" in ways:
                self.say("Through a worker")
                self.report.add_measured(_in_a_process(self.root, self.base, measures, self.seed))
            if "server" in ways:
                self.say("Through a server")
                served = [
                    msgspec.structs.replace(one, grid=_served_grid(one.rank, self.base.device, self.small))
                    for one in measures
                ]
                self.report.add_served(asyncio.run(measure(self.root, self.base, served, self.engine)))

    def _wanted(self, rank: int, adapters: Adapters) -> Measure:
        return Measure(
            rank, adapters.named(SLOTS), _grid(rank, self.small), live=(5, 1 if self.small else 3), tokens=rank == 1
        )


class _Report:
    def __init__(self, file: Path, engine: str, base: Base, seed: int) -> None:
        self.summary: dict[str, Any] = {}
        self._samples: dict[str, Any] = {}
        self._file = file
        self._plain = "worker" if base.device == "cuda" and engine == "vllm" else "server"
        told = {"base": base.name, "device": base.device, "measured_through": self._plain}
        where = environment(seed=seed, engine=engine, stand_in=stand_ins(engine, base.device))
        self._environment = where | told | version_of(engine)

    def add_measured(self, measures: list[Measured]) -> None:
        for one in measures:
            self._environment["accelerator"] = one.accelerator or None
            self._add("worker", one.rank, one.rounds.figures())
            equal = {"slots_equal": one.slots_equal, "floor_ms": one.floor_ms}
            if one.tokens_equal is not None:
                equal |= {"tokens_equal": one.tokens_equal}
            self.summary |= named(equal, one.rank)
            self._samples[f"worker_rank{one.rank}"] = msgspec.to_builtins(one, str_keys=True)
        self._write()

    def add_served(self, measures: list[Served]) -> None:
        for one in measures:
            self._add("server", one.rank, one.rounds.figures())
            self.summary |= named(one.gaps.figures(), one.rank)
            self.summary |= named(one.live.figures(), one.rank, "live")
            self._samples[f"server_rank{one.rank}"] = msgspec.to_builtins(one, str_keys=True)
        self._write()

    def _add(self, through: str, rank: int, figures: dict[str, float]) -> None:
        plain = through == self._plain or (rank > 1 and through == "worker")
        self.summary |= named(figures, rank, "" if plain else through)

    def _write(self) -> None:
        write_report(self._file, self._environment, self._samples, self.summary)


def _grid(rank: int, small: bool) -> dict[int, tuple[int, int]]:
    rounds = 1 if small else 5 if rank == 1 else 3
    return {1: (10, rounds), 4: (3, rounds), 8: (3, rounds), 16: (3, rounds)}


def _served_grid(rank: int, device: str, small: bool) -> dict[int, tuple[int, int]]:
    """What a server adds to an install is much the same for all: a small run takes no more than a few where the
    report's figures are the worker's.
    """
    grid = _grid(rank, small)
    if not small or (rank == 1 and device == "cpu"):
        return grid
    return {n: rounds for n, rounds in grid.items() if rank == 1 and n in (1, SLOTS)}


def _in_a_process(root: Path, base: Base, measures: list[Measure], seed: int) -> list[Measured]:
    """``inside.run`` in a process with an engine's environment. Raises RuntimeError with the end of its output."""
    rank = max(one.rank for one in measures)
    model = base.write(root / base.name)
    job, out = root / "job.json", root / "measured.json"
    job.write_bytes(msgspec.json.encode(Job(str(model), base.device, slot_rank(rank), seed, measures)))
    command = command_for(engine_settings(base, rank, model))
    changes = {**command.env, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
    argv = [sys.executable, "-m", "loadtest.install.inside", str(job), str(out)]
    try:
        done = subprocess.run(
            argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_PROCESS_S
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the engine's process did not end within {_PROCESS_S:g} s") from error
    if done.returncode:
        raise RuntimeError(f"the engine's process ended with {done.returncode}:\n{done.stdout[-6000:]}")
    return msgspec.json.decode(out.read_bytes(), type=list[Measured])
