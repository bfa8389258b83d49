"""What each policy did when, one after another and at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import Measured

_PARTS = (("sample_s", "sampling", "C0"), ("train_s", "training", "C1"), ("save_s", "publishing", "C2"))


def draw(file: Path, found: Measured, base: str) -> None:
    """A row a policy, in the last round of both ways; a policy's beginning is white."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    rows = figure.subplots(2, sharex=True)
    for axes, title, ways in zip(
        rows, ("one after another", "at once"), (found.sequential, found.concurrent), strict=True
    ):
        for row, steps in enumerate(ways[-1].steps if ways else []):
            for step in steps:
                at = step.begun_s
                for field, _, colour in _PARTS:
                    axes.barh(row, getattr(step, field), left=at, color=colour, height=0.7)
                    at += getattr(step, field)
        axes.set_title(f"{title}: {ways[-1].wall_s:.1f} s" if ways else title, fontsize=10)
        axes.set_yticks([])
        axes.invert_yaxis()
    for _, name, colour in _PARTS:
        rows[1].barh(0, 0, color=colour, label=name)
    rows[1].set_xlabel("seconds")
    figure.legend(loc="outside lower center", ncols=len(_PARTS))
    figure.suptitle(f"Three policies of GRPO's shape on one base: {base}")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
