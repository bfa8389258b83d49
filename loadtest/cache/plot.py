"""The picture: for every trace, the bytes that each policy missed over those that LRU missed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sidecar.policies import PolicyName
from wire.outcomes import InvalidRequest

from .replay import Replayed


def draw(file: Path, replays: Mapping[str, Mapping[PolicyName, Replayed]]) -> None:
    """Write a picture of the format that ``file`` ends with. Raises InvalidRequest where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidRequest("--plot needs matplotlib: pip install 'roost[dev]'", field="plot") from None
    figure = Figure(figsize=(9, 2 + 0.2 * len(replays)), layout="constrained")
    axes = figure.add_subplot()
    rows = range(len(replays))
    for policy in PolicyName:
        if policy is PolicyName.LRU:
            continue
        ratios = [found[policy].byte_miss_ratio / found[PolicyName.LRU].byte_miss_ratio for found in replays.values()]
        first = policy is PolicyName.ADAPTIVE
        axes.plot(
            ratios, rows, "o" if first else "x", label=policy.value, alpha=1.0 if first else 0.6, zorder=2 + first
        )
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(rows, list(replays), fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="bytes missed, of those that LRU missed", title="Cache policies on replayed traces")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
