"""What it costs to have an adapter of every expert in a running engine: ours beside the stock way, in the same engine.

Loads go through the driver and the server's HTTP (``server``), and into vLLM as calls of a worker in the same engine
(``inside``), where slots are compared too. The figures without a word in front are a worker's on a GPU, where there is
one, and the server's elsewhere; the others have ``worker_`` or ``server_`` in front. ``live_`` is through the server
while a stream of the base runs, whose longest gap is told in its usual intervals; such a load waits for the step that
runs, and on a GPU for one more, until the engine looks whether the transfer is over.

A stock engine loads one after another: one round of 16 loads gives the figures of its first 1, 4 and 8 as well.
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

from .adapters import Adapter, Adapters
from .bases import SLOTS, Base, base_for, slot_rank
from .engines import device_of, engine_settings, stand_ins, target_names, version_of
from .figures import named
from .jobs import Answered, Grid, Job, Live, Measure, Measured, Served
from .server import measure

PARTS = ("worker", "server", "ranks")
_HIGH_RANKS = (16, 32)
_PROCESS_S = 3600.0
_STOCK_ROUNDS = "the first 1, 4 and 8 of a round of 16 loads give the figures of so many"
# a load of a high rank takes stock vLLM seconds at full size, during which a stream stands still
_STOCK_BESIDE_HIGH_RANKS = 1
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
    tokens: bool = True,
    plot: Path | None = None,
) -> dict[str, Any]:
    """Measure and write the report; returns the summary. ``small`` takes one round of the stock way.

    ``parts``: any of PARTS; ``worker`` and ``server`` are of rank 1, ``ranks`` is 16 and 32 through both. ``tokens``:
    answers are compared too, at rank 1, where there is a ``worker`` part. The report is written after each, so that a
    later one that fails costs only itself. Raises RuntimeError.
    """
    base = base_for(device_of(engine, device), engine)
    if engine == "sglang":
        # it has no worker of ours to call
        parts = {part for part in parts if part != "worker"}
    report = _Report(file, engine, base, seed)
    with tempfile.TemporaryDirectory(prefix="roost-loadtest-") as scratch:
        bench = _Bench(Path(scratch), base, engine, seed, small, say, report)
        if {"worker", "server"} & set(parts):
            bench.measure(_SGLANG_RANKS if engine == "sglang" else (1,), parts, tokens=tokens and "worker" in parts)
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

    def measure(self, ranks: tuple[int, ...], ways: Collection[str], *, tokens: bool = False) -> None:
        """Adapters of all ``ranks`` in one engine, by each of the ways: through a worker, through the server."""
        with ExitStack() as made:
            measures = []
            for rank in ranks:
                self.say(f"Making adapters of rank {rank}")
                targets = target_names(self.engine)
                adapters = made.enter_context(Adapters(self.root, self.base.shape, rank, SLOTS, self.seed, targets))
                measures.append(self._wanted(adapters.named(SLOTS), rank, ways))
            self.say("Loads into a running engine")
            asyncio.run(measure(self.root, self.base, self.engine, measures, self._found))
            if tokens:
                self.say("Answers")
                self.report.add_answers(_answers(self.root, self.base, measures[0], self.seed))

    def _found(self, found: Measured | Served) -> None:
        self.say(f"Rank {found.rank}: {'through a worker' if isinstance(found, Measured) else 'through the server'}")
        self.report.add(found)

    def _wanted(self, adapters: list[tuple[str, Adapter]], rank: int, ways: Collection[str]) -> Measure:
        # what a server adds to an install is much the same for all: a few do where a worker's figures stand beside them
        if rank == 1:
            worth = not self.small or _report_through(self.base, self.engine) == "server"
        else:
            worth = not self.small and "worker" not in ways
        few = Grid({1: 10, SLOTS: 3} if rank == 1 else {}, 0)
        full = Grid({1: 10, 4: 3, 8: 3, 16: 3}, 1 if self.small else 3)
        stock_n = _stock_beside_a_stream(self.base, self.engine, rank)
        live = Live(3 if self.small else 5, 1 if self.small else 3, stock_n)
        return Measure(
            rank, adapters,
            worker=full if "worker" in ways else None,
            server=(full if worth else few) if "server" in ways else None,
            live=live if "server" in ways else None,
        )  # fmt: skip


class _Report:
    def __init__(self, file: Path, engine: str, base: Base, seed: int) -> None:
        self.summary: dict[str, Any] = {}
        self._samples: dict[str, Any] = {}
        self._file = file
        self._plain = _report_through(base, engine)
        told = {
            "base": base.name, "device": base.device, "measured_through": self._plain, "stock_rounds": _STOCK_ROUNDS,
            "stock_loads_beside_a_stream": {
                "rank 1": _stock_beside_a_stream(base, engine, 1), "higher": _stock_beside_a_stream(base, engine, 2),
            },
        }  # fmt: skip
        where = environment(seed=seed, engine=engine, stand_in=stand_ins(engine, base.device))
        self._environment = where | told | version_of(engine)

    def add(self, one: Measured | Served) -> None:
        if isinstance(one, Measured):
            self._environment["accelerator"] = one.accelerator or None
            self._add("worker", one.rank, one.rounds.figures())
            self.summary |= named({"slots_equal": one.slots_equal, "floor_ms": one.floor_ms}, one.rank)
        else:
            self._add("server", one.rank, one.rounds.figures())
            self.summary |= named(one.gaps.figures(), one.rank)
            self.summary |= named(one.live.figures(), one.rank, "live")
        through = "worker" if isinstance(one, Measured) else "server"
        self._samples[f"{through}_rank{one.rank}"] = msgspec.to_builtins(one, str_keys=True)
        self._write()

    def add_answers(self, answered: Answered) -> None:
        if answered.tokens_equal is not None:
            self.summary["tokens_equal"] = answered.tokens_equal
        self._samples["answers"] = msgspec.to_builtins(answered)
        self._write()

    def _add(self, through: str, rank: int, figures: dict[str, float]) -> None:
        plain = through == self._plain or (rank > 1 and through == "worker")
        self.summary |= named(figures, rank, "" if plain else through)

    def _write(self) -> None:
        write_report(self._file, self._environment, self._samples, self.summary)


def _report_through(base: Base, engine: str) -> str:
    """Where a report's figures without a word in front come from."""
    return "worker" if base.device == "cuda" and engine == "vllm" else "server"


def _stock_beside_a_stream(base: Base, engine: str, rank: int) -> int:
    """How many loads of the stock way a stream is told beside."""
    full_size = base.device == "cuda" and engine == "vllm"
    return _STOCK_BESIDE_HIGH_RANKS if full_size and rank > 1 else SLOTS


def _answers(root: Path, base: Base, measure: Measure, seed: int) -> Answered:
    """``inside.run`` in a process with an engine's environment. Raises RuntimeError with the end of its output."""
    model = base.write(root / base.name)
    job, out = root / "job.json", root / "answered.json"
    job.write_bytes(msgspec.json.encode(Job(str(model), base.device, slot_rank(measure.rank), seed, measure.adapters)))
    command = command_for(engine_settings(base, measure.rank, model))
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
    return msgspec.json.decode(out.read_bytes(), type=Answered)
