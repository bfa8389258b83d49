"""The picture: look-ups a second and their times over the size of the catalog, opens, and the import's course."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wire.outcomes import InvalidRequest

_KINDS = {"channel_uniform": "by channel", "channel_zipf": "by channel, Zipf", "numbered_uniform": "by number"}


def draw(file: Path, samples: dict[str, Any], summary: dict[str, Any]) -> None:
    """Write a picture of the format that ``file`` ends with. Raises InvalidRequest where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidRequest("--plot needs matplotlib: pip install 'roost[dev]'", field="plot") from None
    figure = Figure(figsize=(11, 7), layout="constrained")
    rates, times, opens, importing = figure.subplots(2, 2).flat
    by_size = samples["lookups"]
    sizes = [int(size) for size in by_size]
    for kind, label in _KINDS.items():
        rates.plot(sizes, _medians(by_size, kind, "per_s"), marker="o", label=label)
        times.plot(sizes, _medians(by_size, kind, "p99_us"), marker="o", label=f"{label}, p99")
    times.plot(sizes, _medians(by_size, "channel_uniform", "p50_us"), marker="o", label="by channel, p50")
    rates.set(title="Look-ups a second", xscale="log", ylim=(0, None), xlabel="policies")
    times.set(title="Microseconds a look-up", xscale="log", ylim=(0, None), xlabel="policies")
    opened = [statistics.median(samples["opens"][str(size)]["ms"]) for size in sizes]
    opens.plot(sizes, opened, marker="o")
    opens.set(title="Milliseconds to open and answer", xscale="log", ylim=(0, None), xlabel="policies")
    done = samples["import"]["acknowledged_s"]
    importing.plot(done, [samples["import"]["batch"] * number for number in range(1, len(done) + 1)])
    importing.set(title=f"Import: {summary['import_1m_s']} s", xlabel="seconds", ylabel="policies", ylim=(0, None))
    for axes in (rates, times):
        axes.legend()
    for axes in (rates, times, opens, importing):
        axes.grid(alpha=0.3)
    figure.savefig(file)


def _medians(by_size: dict[str, Any], kind: str, name: str) -> Sequence[float]:
    return [statistics.median(figures[kind][name]) for figures in by_size.values()]
