"""A run as a result file, as benchmarks write them: where it ran, every step, and figures before and after."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loadtest.report import environment, write_report

from .config import FILES
from .folder import Figures, RunFolder
from .search import Found

_ENGINE = "the engine and the trainer of the mesh that it ran at, as deployed"


def report_run(file: Path, folder: RunFolder) -> None:
    """``before_NAME``, ``after_NAME`` and ``gain_NAME`` of each held-out figure; tokens a second over all steps."""
    state, lines = folder.state, folder.lines()
    first, last = min(state.evaluations), max(state.evaluations)
    seconds = sum(line["seconds"] for line in lines)
    summary = {
        "recipe": state.recipe,
        "steps": last,
        **_compared("before", state.evaluations[first], "after", state.evaluations[last]),
        "tokens_per_s": sum(line["tokens_per_s"] * line["seconds"] for line in lines) / seconds,
        "training_s": seconds,
    }
    # where the files lay is nobody else's affair
    config = {name: Path(value).name if name in FILES else value for name, value in state.config.items()}
    samples = {"config": config, "evaluations": state.evaluations, "steps": lines}
    write_report(file, environment(seed=state.config["seed"], engine=_ENGINE), samples, summary)


def report_search(file: Path, found: Found, *, seed: int) -> None:
    """``median_NAME``, ``winner_NAME`` and ``gain_NAME`` of each figure on the test items."""
    summary = {
        "recipe": "search",
        "candidates": len(found.rounds[0]),
        "rounds": len(found.rounds),
        "winner": found.winner,
        "median": found.median,
        **_compared("median", found.median_figures, "winner", found.winner_figures),
    }
    write_report(file, environment(seed=seed, engine=_ENGINE), {"rounds": found.rounds}, summary)


def _compared(one: str, figures: Figures, other: str, others: Figures) -> Mapping[str, float]:
    told: dict[str, float] = {}
    for name, value in figures.items():
        told |= {f"{one}_{name}": value, f"{other}_{name}": others[name], f"gain_{name}": others[name] - value}
    return told
