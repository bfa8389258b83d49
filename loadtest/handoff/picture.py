"""How long each way takes until the first token."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import Measured


def draw(file: Path, found: Measured, base: str) -> None:
    """Bars on a logarithmic axis, with every sample as a dot; a way that was not measured is left out."""
    from matplotlib.figure import Figure

    each = [one for round_ in found.handoffs for one in round_]
    ways = {
        "a warm first token": [warm for one in each for warm in one.warm_s],
        "handoff": [one.total_s for one in each],
        "merge, reload in place": [one.total_s for one in found.in_place],
        "merge, engine restarted": [one.total_s for one in found.restarts],
    }
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for row, (name, seconds) in enumerate(ways.items()):
        if seconds:
            axes.barh(row, statistics.median(seconds), color=f"C{row}", alpha=0.6)
            axes.plot(seconds, [row] * len(seconds), "o", color=f"C{row}", markersize=3)
            axes.annotate(f" {name}: {statistics.median(seconds):.3g} s", (min(seconds) / 1.5, row + 0.42), fontsize=8)
    axes.set_xscale("log")
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_xlabel("seconds until the first token")
    axes.set_title(f"From a step of training to an answer: {base}")
    axes.grid(visible=True, axis="x", alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
