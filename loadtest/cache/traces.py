"""Traces of which revision is asked for when: families of what serving policies looks like, each made from a seed.

Real traces of adapters are not public. What is known of such workloads is in the families: popularity by Zipf, which
drifts; training runs that publish and never ask for the old again; sweeps over whole tenants beside a hot set; loops;
tenants that come in bursts; recency. Ranks, and with them sizes, differ by a factor of up to 32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

# rank-1 of Qwen3-30B-A3B's attention alone is about this; only ratios count
UNIT_BYTES = 1 << 20
RANKS = (1, 2, 4, 8, 16, 32)
_RANK_WEIGHTS = (0.10, 0.10, 0.15, 0.30, 0.25, 0.10)


class Trace(NamedTuple):
    """``keys`` in the order in which they are asked for; ``sizes`` in bytes, by key; ``capacity`` of the cache."""

    name: str
    keys: Numbers
    sizes: Numbers
    capacity: int


class _Family(NamedTuple):
    name: str
    make: Callable[[np.random.Generator, int], Numbers]


def traces(seed: int, *, length: int) -> Iterator[Trace]:
    """Every family, with sizes alike and mixed, over a small and a large cache. ``length`` asks each."""
    for number, family in enumerate(_FAMILIES):
        keys = family.make(np.random.default_rng([seed, number]), length)
        distinct = int(keys.max()) + 1
        for mixed in (False, True):
            rng = np.random.default_rng([seed, number, mixed])
            ranks = rng.choice(RANKS, distinct, p=_RANK_WEIGHTS) if mixed else np.full(distinct, 8)
            sizes = ranks.astype(np.int64) * UNIT_BYTES
            footprint = int(sizes[np.unique(keys)].sum())
            for share in _CACHE_SHARES:
                name = f"{family.name}, {'ranks mixed' if mixed else 'one rank'}, {share:.0%} cached"
                yield Trace(name, keys, sizes, max(int(footprint * share), 4 * int(sizes.max())))


def _zipf(rng: np.random.Generator, count: int, distinct: int, alpha: float) -> Numbers:
    """Numbers from 0, drawn with a probability that falls with the number to the power of ``-alpha``."""
    weights = np.cumsum(1.0 / np.arange(1, distinct + 1) ** alpha)
    drawn: Numbers = np.searchsorted(weights, rng.random(count) * weights[-1]).astype(np.int64)
    return np.minimum(drawn, distinct - 1)


def _steady(alpha: float) -> Callable[[np.random.Generator, int], Numbers]:
    """Popularity that never changes."""

    def make(rng: np.random.Generator, length: int) -> Numbers:
        return rng.permutation(_POLICIES)[_zipf(rng, length, _POLICIES, alpha)]

    return make


def _drifting(moved: float) -> Callable[[np.random.Generator, int], Numbers]:
    """Fifty times, the share ``moved`` of all policies change places in popularity."""

    def make(rng: np.random.Generator, length: int) -> Numbers:
        order = rng.permutation(_POLICIES)
        parts = []
        for part in np.array_split(_zipf(rng, length, _POLICIES, 0.9), 50):
            parts.append(order[part])
            places = rng.choice(_POLICIES, max(2, int(_POLICIES * moved)), replace=False)
            order[places] = order[rng.permutation(places)]
        return np.concatenate(parts)

    return make


def _scans(rng: np.random.Generator, length: int) -> Numbers:
    """A hot set, and every now and then a sweep over a tenth of all policies, each asked once."""
    keys = rng.permutation(_POLICIES)[_zipf(rng, length, _POLICIES, 1.0)]
    sweep = _POLICIES // 10
    for start in range(sweep, length - sweep, 8 * sweep):
        first = int(rng.integers(_POLICIES - sweep))
        keys[start : start + sweep] = np.arange(first, first + sweep)
    return keys


def _loops(rng: np.random.Generator, length: int) -> Numbers:
    """An evaluation that goes round a quarter of all policies, beside steady traffic."""
    keys = rng.permutation(_POLICIES)[_zipf(rng, length, _POLICIES, 0.9)]
    turn = rng.random(length) < 0.5
    keys[turn] = np.arange(int(turn.sum())) % (_POLICIES // 4)
    return keys


def _bursts(rng: np.random.Generator, length: int) -> Numbers:
    """Tenants of fifty policies; a few are active at a time, for a few hundred asks each."""
    tenants = _POLICIES // 50
    active = list(rng.choice(tenants, 6, replace=False))
    within = _zipf(rng, length, 50, 0.6)
    keys = np.empty(length, np.int64)
    for at in range(length):
        if rng.random() < 1 / 80:
            active[int(rng.integers(6))] = int(_zipf(rng, 1, tenants, 0.5)[0])
        keys[at] = active[int(rng.integers(6))] * 50 + within[at]
    return keys


def _revisions(every: int) -> Callable[[np.random.Generator, int], Numbers]:
    """Each policy gets a new revision after ``every`` asks, on average; the old one is not asked for again."""

    def make(rng: np.random.Generator, length: int) -> Numbers:
        policies = _POLICIES // 4
        present = np.arange(policies)
        newest = policies
        keys = np.empty(length, np.int64)
        for at, policy in enumerate(_zipf(rng, length, policies, 0.8)):
            if rng.random() < 1 / every:
                present[policy] = newest
                newest += 1
            keys[at] = present[policy]
        return keys

    return make


def _recency(rng: np.random.Generator, length: int) -> Numbers:
    """What was asked for lately is asked for again: the depth in the order of last use is log-normal."""
    stack = list(rng.permutation(_POLICIES))
    depths = np.minimum(rng.lognormal(4.0, 2.0, length).astype(np.int64), _POLICIES - 1)
    keys = np.empty(length, np.int64)
    for at, depth in enumerate(depths):
        keys[at] = stack.pop(depth)
        stack.insert(0, keys[at])
    return keys


def _once(rng: np.random.Generator, length: int) -> Numbers:
    """Four in ten asks are for something that is never asked for again."""
    keys = rng.permutation(_POLICIES)[_zipf(rng, length, _POLICIES, 0.9)]
    once = rng.random(length) < 0.4
    keys[once] = _POLICIES + np.arange(int(once.sum()))
    return keys


def _shifts(rng: np.random.Generator, length: int) -> Numbers:
    """Two populations that take turns, with little in common."""
    drawn = _zipf(rng, length, _POLICIES, 0.9)
    day, night = rng.permutation(_POLICIES), rng.permutation(_POLICIES)
    turn = (np.arange(length) * 10 // length) % 2 == 0
    return np.where(turn, day[drawn], night[drawn])


_POLICIES = 3000
_CACHE_SHARES = (0.03, 0.15)
_FAMILIES = (
    _Family("Zipf 0.6", _steady(0.6)),
    _Family("Zipf 0.9", _steady(0.9)),
    _Family("Zipf 1.2", _steady(1.2)),
    _Family("Zipf that drifts", _drifting(0.02)),
    _Family("Zipf that drifts fast", _drifting(0.2)),
    _Family("sweeps and a hot set", _scans),
    _Family("loops", _loops),
    _Family("bursts of tenants", _bursts),
    _Family("revisions", _revisions(50)),
    _Family("revision storm", _revisions(5)),
    _Family("recency", _recency),
    _Family("asked once", _once),
    _Family("day and night", _shifts),
)
