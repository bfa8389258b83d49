"""Cache policies on replayed traces: how many bytes each lets be brought again, beside LRU on the same trace.

Traces are generated (``traces``), since those of real adapters are not public, and recorded from simulated nodes
(``recorded``). Every policy is replayed through the arena's own index, fragmentation and all.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from msgspec import structs

from sidecar.policies import PolicyName
from sidecar.settings import SidecarSettings

from ..report import environment, write_report
from .plot import draw
from .recorded import recorded
from .replay import BYTES_PER_S, LATENCY_S, Replayed, replay
from .traces import RANKS, UNIT_BYTES, Trace, traces

Say = Callable[[str], object]
Replays = Mapping[str, Mapping[PolicyName, Replayed]]


def run(
    file: Path, *, small: bool, seed: int, plot: Path | None = None, say: Say = lambda text: None
) -> dict[str, Any]:
    """Replay and write the report; returns the summary. ``small`` has shorter traces."""
    say("recording simulated nodes")
    simulated = list(recorded(seed, asks=6_000 if small else 40_000))
    say("replaying")
    replays = measure([*traces(seed, length=12_000 if small else 60_000), *simulated], say)
    summary = summarise(replays)
    stand_in = {
        "traces": "generated, and recorded from simulated nodes", "latency_s": LATENCY_S, "bytes_per_s": BYTES_PER_S,
        "unit_bytes": UNIT_BYTES, "ranks": RANKS,
    }  # fmt: skip
    samples = {
        name: {
            policy: {kind: round(value, 5) for kind, value in found._asdict().items()}
            for policy, found in by_policy.items()
        }
        for name, by_policy in replays.items()
    }
    write_report(file, environment(seed=seed, engine="none", stand_in=stand_in), samples, summary)
    if plot is not None:
        draw(plot, replays)
    return summary


def default_policy() -> PolicyName:
    """What a sidecar has unless it is told otherwise."""
    by_name = {field.name: field.default for field in structs.fields(SidecarSettings)}
    return PolicyName(by_name["cache_policy"])


def measure(found: Iterable[Trace], say: Say) -> dict[str, dict[PolicyName, Replayed]]:
    """Every policy on every trace, by the trace's name."""
    replays: dict[str, dict[PolicyName, Replayed]] = {}
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        waiting = [
            (trace.name, policy, processes.submit(replay, trace, policy)) for trace in found for policy in PolicyName
        ]
        for name, policy, future in waiting:
            if name not in replays:
                say(name)
            replays.setdefault(name, {})[policy] = future.result()
    return replays


def summarise(replays: Replays) -> dict[str, Any]:
    """The default policy against LRU, in bytes missed; and the others, with their names in front."""
    chosen = default_policy()
    figures: dict[str, Any] = {"traces": len(replays), "policy": chosen.value}
    for policy in PolicyName:
        if policy is PolicyName.LRU:
            continue
        ratios = [over_lru(by_policy, policy) for by_policy in replays.values()]
        prefix = "" if policy is chosen else f"{policy.value}_"
        figures[f"{prefix}better_than_lru"] = round(sum(ratio < 1.0 for ratio in ratios) / len(ratios), 3)
        figures[f"{prefix}worst_over_lru"] = round(max(ratios), 4)
        figures[f"{prefix}median_over_lru"] = round(statistics.median(ratios), 4)
    return figures


def over_lru(by_policy: Mapping[PolicyName, Replayed], policy: PolicyName) -> float:
    """Bytes missed over those that LRU misses."""
    return by_policy[policy].byte_miss_ratio / by_policy[PolicyName.LRU].byte_miss_ratio
