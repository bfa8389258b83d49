"""What it costs to have an adapter of every expert in a running engine: ours beside stock vLLM's, in the same engine.

Loads go through the driver and the server's HTTP (``server``), and as calls of the worker in the engine's process
(``worker``), where slots and tokens are compared too. The figures without a word in front are the server's on a CPU and
the worker's on a GPU; the others have ``worker_`` or ``server_`` in front. ``live_`` is through the server while a
stream of the base runs, whose longest gap is told in its usual intervals.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from backends.interface import EngineSettings
from backends.vllm.command import command_for, device_of
from loadtest.report import environment, write_report

from .adapters import Adapters
from .bases import SLOTS, Base, base_for, slot_rank
from .figures import named
from .jobs import Job, Measure, Measured, Served
from .server import engine_settings, measure

PARTS = ("worker", "server", "ranks")
_HIGH_RANKS = (16, 32)
_STAND_IN = {"weights": "made up by the engine (load format dummy)"}


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
    """Measure and write the report; returns the summary. ``small`` takes one round of the stock way, and loads but one
    adapter of a high rank so.

    ``parts``: any of PARTS; ``ranks`` is ranks 16 and 32 through the worker, unless ``small`` through a server too.
    The report is written after each, so that a later one that fails costs only itself. Raises RuntimeError.
    """
    base = base_for(device_of(EngineSettings(name="install", base="", fingerprint="", device=device)))
    report = _Report(file, engine, base, seed)
    with tempfile.TemporaryDirectory(prefix="roost-loadtest-") as scratch:
        root = Path(scratch)
        if {"worker", "server"} & set(parts):
            say("Making adapters of rank 1")
            with Adapters(root, base.shape, 1, SLOTS, seed) as adapters:
                wanted = Measure(1, adapters.named(SLOTS), _grid(1, small), tokens=True)
                if "worker" in parts:
                    say("Through a worker")
                    report.add_measured(_in_a_process(root, base, [wanted], seed))
                if "server" in parts:
                    say("Through a server")
                    report.add_served(asyncio.run(measure(root, base, [wanted])))
        if "ranks" in parts:
            say(f"Making adapters of ranks {_HIGH_RANKS}")
            low, high = (Adapters(root, base.shape, rank, SLOTS, seed) for rank in _HIGH_RANKS)
            with low, high:
                ranks = zip(_HIGH_RANKS, (low, high), strict=True)
                measures = [Measure(rank, one.named(SLOTS), _grid(rank, small)) for rank, one in ranks]
                say("Through a worker")
                report.add_measured(_in_a_process(root, base, measures, seed))
                if not small:
                    say("Through a server")
                    report.add_served(asyncio.run(measure(root, base, measures)))
    if plot is not None:
        from .picture import draw

        draw(plot, report.summary, base.name)
    return report.summary


class _Report:
    def __init__(self, file: Path, engine: str, base: Base, seed: int) -> None:
        self.summary: dict[str, Any] = {}
        self._samples: dict[str, Any] = {}
        self._file = file
        self._plain = "worker" if base.device == "cuda" else "server"
        self._environment = environment(seed=seed, engine=engine, stand_in=_STAND_IN) | {
            "base": base.name, "device": base.device, "measured_through": self._plain,
        }  # fmt: skip

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
    if rank == 1:
        rounds = 1 if small else 5
        return {1: (10, rounds), 4: (3, rounds), 8: (3, rounds), 16: (3, rounds)}
    once = 0 if small else 1
    return {1: (10, 1 if small else 3), 4: (3, once), 8: (2, once), 16: (2, once)}


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
    done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"the engine's process ended with {done.returncode}:\n{done.stdout[-6000:]}")
    return msgspec.json.decode(out.read_bytes(), type=list[Measured])
