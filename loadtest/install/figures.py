"""From what was measured to the figures of a report."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loadtest.report import percentile


class Round(msgspec.Struct):
    """``n`` adapters installed at once, by one way: each one's own milliseconds and all of them together."""

    n: int
    each_ms: list[float]
    total_s: float

    def first(self, n: int) -> Round:
        """Its first ``n``, which stand for a round of so many where loads run one after another."""
        return self if n == self.n else Round(n, self.each_ms[:n], sum(self.each_ms[:n]) / 1e3)


class Rounds(msgspec.Struct):
    """Rounds of both ways in turn: after every few of ours one of the stock way.

    A stock engine loads strictly one after another, so a round of the stock way tells of every smaller one as well.
    """

    ours: list[list[Round]] = []
    stock: list[Round] = []

    def figures(self) -> dict[str, float]:
        """For each n: medians and totals of both ways, and the median of the pairs' ratios."""
        found: dict[str, float] = {}
        for n in sorted({one.n for group in self.ours for one in group}):
            groups = [group for group in self.ours if group[0].n == n]
            each = [ms for group in groups for one in group for ms in one.each_ms]
            totals = [statistics.median(one.total_s for one in group) for group in groups]
            found[f"ours_{n}_p50_ms"] = round(percentile(each, 0.5), 3)
            found[f"ours_{n}_p95_ms"] = round(percentile(each, 0.95), 3)
            found[f"ours_{n}_total_s"] = round(statistics.median(totals), 5)
            stock = [one.first(n) for one in self.stock if one.n >= n]
            if stock:
                found[f"stock_{n}_p50_ms"] = round(percentile([ms for one in stock for ms in one.each_ms], 0.5), 1)
                found[f"stock_{n}_total_s"] = round(statistics.median(one.total_s for one in stock), 3)
                ratios = [one.total_s / ours for one, ours in zip(stock, totals, strict=False)]
                found[f"speedup_{n}"] = round(statistics.median(ratios), 1)
        return found


class Gaps(msgspec.Struct):
    """A running stream's token intervals in milliseconds: while nothing is loaded, and each round's longest one."""

    quiet_ms: list[float] = []
    ours_ms: list[float] = []
    stock_ms: list[float] = []

    def figures(self) -> dict[str, float]:
        """In usual (median) intervals: the longest of all rounds, the median of the rounds' longest (``_p50``), and for
        comparison the longest while nothing was loaded.
        """
        usual = statistics.median(self.quiet_ms)
        found = {"gap_intervals_quiet": max(self.quiet_ms) / usual}
        for way, longest in (("ours", self.ours_ms), ("stock", self.stock_ms)):
            if longest:
                found[f"gap_intervals_{way}"] = max(longest) / usual
                found[f"gap_intervals_{way}_p50"] = statistics.median(longest) / usual
        return {name: round(value, 2) for name, value in found.items()} | {"interval_ms": round(usual, 2)}


def named(figures: Mapping[str, Any], rank: int, through: str = "") -> dict[str, Any]:
    """With the rank in front, unless it is 1, and what they were measured through, where that needs saying."""
    front = ("" if rank == 1 else f"rank{rank}_") + (f"{through}_" if through else "")
    return {f"{front}{name}": value for name, value in figures.items()}


def intervals_ms(times: Sequence[float]) -> list[float]:
    """Between events at ``times`` (seconds), in milliseconds."""
    return [(after - before) * 1e3 for before, after in itertools.pairwise(times)]
