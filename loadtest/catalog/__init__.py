"""What the catalog costs from a thousand policies to ten million: look-ups, opens, imports and commits.

Look-ups of all sizes take turns within one process, so that a ratio compares what the same machine did in the same
seconds. Catalogs are filled through the code that the registrar fills its own with; commits and the import go to a
real registrar process.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import uvloop

from ..report import environment, write_report
from . import commits, followers, imports, lookups, opens
from .filled import fill
from .plot import draw

Say = Callable[[str], object]

SIZES = (1_000, 10_000, 100_000, 1_000_000)
LARGEST = 10_000_000
REVISIONS = 3
QUANTILES = 2001


def run(
    file: Path, *, small: bool, seed: int, plot: Path | None = None, say: Say = lambda text: None,
    scratch: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure and write the report; returns the summary. ``scratch`` is a folder on the disk to be measured."""
    with tempfile.TemporaryDirectory(prefix="roost-loadtest-", dir=scratch) as folder:
        samples = _measure(Path(folder), small, seed, say)
    summary = _summary(samples)
    stand_in = commits.STAND_IN
    write_report(file, environment(seed=seed, engine="none", stand_in=stand_in), thinned(samples), summary)
    if plot is not None:
        draw(plot, samples, summary)
    return summary


def _measure(folder: Path, small: bool, seed: int, say: Say) -> dict[str, Any]:
    say("commits, alone and by 64 publishers")
    samples: dict[str, Any] = {"commits": uvloop.run(commits.measure(folder / "commits", rounds=3 if small else 9))}
    say("followers")
    samples["followers"] = followers.measure(folder / "followers", small=small)
    say("importing a million policies")
    samples["import"] = uvloop.run(imports.measure(folder / "import", 1_000_000))
    sizes = SIZES if small else (*SIZES, LARGEST)
    say(f"filling catalogs of up to {sizes[-1]:,} policies")
    catalogs = _filled(folder, sizes)
    say("look-ups")
    samples["lookups"] = lookups.measure(catalogs, rounds=15 if small else 45, seed=seed)
    say("opens")
    samples["opens"] = opens.measure(catalogs, rounds=5 if small else 15)
    return samples


def _filled(folder: Path, sizes: Sequence[int]) -> dict[int, Path]:
    """Catalogs by size, the smallest first; made two at a time, the largest before the others."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context) as processes:
        filling = {
            size: processes.submit(fill, folder / f"{size}", size, REVISIONS if size < LARGEST else 1)
            for size in reversed(sizes)
        }
        return {size: filling[size].result() for size in sizes}


def thinned(samples: Any) -> Any:
    """The same with at most ``QUANTILES`` of the figures of each list, evenly from the smallest to the largest."""
    if isinstance(samples, dict):
        return {name: thinned(value) for name, value in samples.items()}
    if not isinstance(samples, list) or len(samples) <= QUANTILES:
        return samples
    ordered = sorted(samples)
    return [ordered[round(place * (len(ordered) - 1) / (QUANTILES - 1))] for place in range(QUANTILES)]


def _summary(samples: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    by_size = samples["lookups"]
    million = by_size["1000000"]["channel_uniform"]
    for share in (50, 99):
        found[f"resolve_p{share}_us"] = round(statistics.median(million[f"p{share}_us"]), 2)
        numbered = by_size["1000000"]["numbered_uniform"]
        found[f"resolve_numbered_p{share}_us"] = round(statistics.median(numbered[f"p{share}_us"]), 2)
    found["throughput_1m_over_10k"] = _ratio(by_size, "1000000", "10000")
    if str(LARGEST) in by_size:
        found["throughput_10m_over_1m"] = _ratio(by_size, str(LARGEST), "1000000")
        opened = samples["opens"][str(LARGEST)]
        found["open_10m_ms"] = round(statistics.median(opened["ms"]), 2)
        found["open_10m_private_mb"] = round(statistics.median(opened["private_mb"]), 2)
    found["import_1m_s"] = round(samples["import"]["seconds"], 2)
    found["bytes_per_policy"] = round(samples["import"]["file_bytes"] / samples["import"]["policies"], 1)
    return found | commits.summary(samples["commits"]) | followers.summary(samples["followers"])


def _ratio(by_size: dict[str, Any], larger: str, smaller: str) -> float:
    """Median of pairs of one round each."""
    rates = [by_size[size]["channel_uniform"]["per_s"] for size in (larger, smaller)]
    return round(float(statistics.median(ours / base for ours, base in zip(*rates, strict=True))), 3)
