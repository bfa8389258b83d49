"""Total seconds until all adapters are there, by how many, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw(file: Path, summary: Mapping[str, Any], base: str) -> None:
    """Lines on logarithmic axes; a rank or a way that was not measured is left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    fronts = {"": "rank 1", "rank16_": "rank 16", "rank32_": "rank 32"}
    for number, (front, rank) in enumerate(fronts.items()):
        for way, style in (("stock", "o--"), ("ours", "o-")):
            totals = {n: summary.get(f"{front}{way}_{n}_total_s") for n in (1, 4, 8, 16)}
            known = {n: total for n, total in totals.items() if total is not None}
            if known:
                axes.plot(list(known), list(known.values()), style, color=f"C{number}", label=f"{rank}, {way}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([1, 4, 8, 16], ["1", "4", "8", "16"])
    axes.set_xlabel("adapters asked for at once")
    axes.set_ylabel("seconds until all are there")
    axes.set_title(f"Adapters of 37,248 tensors into a running engine: {base}")
    axes.grid(visible=True, which="major", alpha=0.3)
    figure.legend(loc="outside right upper")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
