"""A run's picture: every metric over the steps, with what evaluations saw."""

from __future__ import annotations

from pathlib import Path

from .folder import RunFolder

# how a run went, and not what it learnt
_LEFT_OUT = {"step", "seconds", "gradient_norm"}
_COLUMNS = 3


def draw(folder: RunFolder, file: Path) -> None:
    """Write a picture of the format that ``file`` ends with."""
    from matplotlib.figure import Figure

    lines, evaluations = folder.lines(), folder.state.evaluations
    seen = {name for line in lines for name in line} | {name for each in evaluations.values() for name in each}
    names = sorted(seen - _LEFT_OUT)
    rows = max(1, -(-len(names) // _COLUMNS))
    figure = Figure(figsize=(4 * _COLUMNS, 2.8 * rows), layout="constrained")
    for place, name in enumerate(names):
        axes = figure.add_subplot(rows, _COLUMNS, place + 1)
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            axes.plot(*zip(*points, strict=True), label="training")
        held_out = sorted((step, figures[name]) for step, figures in evaluations.items() if name in figures)
        if held_out:
            axes.plot(*zip(*held_out, strict=True), marker="o", linestyle="--", label="held out")
            axes.legend()
        axes.set(title=name.replace("_", " "), xlabel="step")
        axes.grid(alpha=0.3)
    figure.suptitle(f"{folder.state.recipe}: {folder.state.config['policy']}")
    figure.savefig(file)
