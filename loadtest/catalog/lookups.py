"""Resolving references: parsed name to revision, artifact and base, decoded; a clock around each call.

Per-call times come from one pass and throughput from another, which reads no clock between calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from catalog.names import Reference, parse_reference
from catalog.view import CatalogView

from ..report import percentile
from .filled import policy_name

CALLS = 20_000
# Zipf's exponent of the popularity of policies, near what web requests show
_EXPONENT = 1.1
_Chosen = dict[str, list[list[Reference]]]


def measure(catalogs: Mapping[int, Path], *, rounds: int, seed: int) -> dict[str, Any]:
    """By size and kind of look-up: p50_us, p99_us and per_s of each round. Sizes take turns in every round."""
    chance = np.random.default_rng(seed)
    views = {size: CatalogView.open(folder) for size, folder in catalogs.items()}
    found: dict[str, Any] = {str(size): {} for size in catalogs}
    for turn in range(rounds + 1):
        for size, view in views.items():
            for kind, references in _references(chance, size, view).items():
                figures = _timed(view.resolve, references)
                # the first round warms the caches up
                if turn:
                    kept = found[str(size)].setdefault(kind, {name: [] for name in figures})
                    for name, figure in figures.items():
                        kept[name].append(figure)
    for view in views.values():
        view.close()
    return found


def _references(chance: np.random.Generator, size: int, view: CatalogView) -> dict[str, list[Reference]]:
    uniform = chance.integers(0, size, CALLS)
    # popular policies lie anywhere among the names
    zipf = (chance.zipf(_EXPONENT, CALLS) * 2_654_435_761) % size
    latest = view.resolve(parse_reference(policy_name(0))).revision
    numbers = chance.integers(1, latest + 1, CALLS)
    return {
        "channel_uniform": [parse_reference(policy_name(int(number))) for number in uniform],
        "channel_zipf": [parse_reference(policy_name(int(number))) for number in zipf],
        "numbered_uniform": [
            parse_reference(f"{policy_name(int(number))}@{revision}")
            for number, revision in zip(uniform, numbers, strict=True)
        ],
    }


def _timed(resolve: Callable[[Reference], object], references: list[Reference]) -> dict[str, float]:
    clock = time.perf_counter_ns
    half = len(references) // 2
    times = []
    for reference in references[:half]:
        begun = clock()
        resolve(reference)
        times.append(clock() - begun)
    begun = clock()
    for reference in references[half:]:
        resolve(reference)
    per_s = (len(references) - half) / (clock() - begun) * 1e9
    return {
        "p50_us": percentile(times, 0.5) / 1000, "p99_us": percentile(times, 0.99) / 1000, "per_s": round(per_s),
    }  # fmt: skip
