"""Successive halving (Jamieson and Talwalkar, 2016): many policies are trained at once, and the better half goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from wire.outcomes import InvalidRequest

from .config import Search, Sft
from .course import Course, Watcher
from .folder import Figures
from .sft import Supervised
from .text import Text


class Found(NamedTuple):
    """Policies, each with its figures on the test items; ``rounds`` has every round's metric by policy."""

    winner: str
    winner_figures: Figures
    median: str
    median_figures: Figures
    rounds: list[dict[str, float]]


class Halving:
    """A search at the training service ``service``. What was done before a kill is not done again."""

    def __init__(self, search: Search, service: Any, text: Text, watch: Callable[[Sft], Watcher]) -> None:
        """Raises InvalidRequest, and VersionConflict where a candidate's folder holds another run."""
        self._search = search
        self._text = text
        self._courses = {
            candidate.policy: Course(Supervised(candidate, text), candidate, service, watch(candidate))
            for candidate in search.candidates()
        }

    async def run(self) -> Found:
        """Train, choose, and judge the winner beside the candidate that was the median of the first round.

        The median candidate is trained to as many steps first, so that what is compared is the choice. The winner is
        published.
        """
        rounds: list[dict[str, float]] = []
        left = list(self._courses)
        for step in self._search.rounds:
            told = await asyncio.gather(*(self._courses[name].advance(step) for name in left))
            rounds.append({name: self._metric(figures) for name, figures in zip(left, told, strict=True)})
            left = best_half(rounds[-1])
        winner, median = left[0], middle(rounds[0])
        await self._courses[median].advance(self._search.rounds[-1])
        judged = [await self._courses[name].judge(self._judge(name)) for name in (winner, median)]
        await self._courses[winner].publish()
        return Found(winner, judged[0], median, judged[1], rounds)

    def _metric(self, figures: Figures) -> float:
        """What is to be large: a loss counts the other way round. Raises InvalidRequest."""
        name = self._search.metric
        if name not in figures:
            raise InvalidRequest(f"metric: {name!r} is not among {', '.join(figures)}", field="metric")
        return -figures[name] if name == "loss" else figures[name]

    def _judge(self, name: str) -> Supervised:
        candidates = {each.policy: each for each in self._search.candidates()}
        config = msgspec.structs.replace(candidates[name], held_out=self._search.test, held_out_items=0)
        return Supervised(config, self._text)


def best_half(scores: dict[str, float]) -> list[str]:
    """The better half, the best first; of equals the one that was first."""
    ordered = _ordered(scores)
    return ordered[: max(1, len(ordered) // 2)]


def middle(scores: dict[str, float]) -> str:
    """Whose score is the (lower) median."""
    ordered = _ordered(scores)
    return ordered[len(ordered) // 2]


def _ordered(scores: dict[str, float]) -> list[str]:
    return sorted(scores, key=lambda name: -scores[name])
