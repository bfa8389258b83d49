"""The engines of a node that run one base, summed up, and what nodes have of that base."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Self

import msgspec

from wire.node import EngineReport, Health

Deployed = tuple[str, str]
"""A base as deployed: its name and its fingerprint."""


class Kind(NamedTuple):
    """What one sort of engine takes of adapters. An engine that starts has no ``targets`` yet: it may take any.

    ``max_rank`` is 0 where it takes none at all. ``ready``: one of the sort is.
    """

    backend: str
    max_rank: int
    targets: frozenset[str]
    ready: bool

    @classmethod
    def of(cls, engine: EngineReport) -> Self:
        return cls(engine.backend, engine.max_rank, frozenset(engine.targets), engine.health is Health.READY)

    def takes(self, rank: int, targets: Collection[str]) -> bool:
        """Whether it takes an adapter of that rank that changes these modules; any takes (0, ()), the base."""
        return rank <= self.max_rank and (not self.targets or self.targets.issuperset(targets))

    def lacks(self, rank: int, targets: Collection[str]) -> str:
        """Why it takes no such adapter."""
        if not self.max_rank:
            return f"{self.backend} takes no adapters of this base"
        if rank > self.max_rank:
            return f"rank {rank} is above {self.backend}'s {self.max_rank}"
        return f"{self.backend} can't change {', '.join(name for name in targets if name not in self.targets)}"


def why_none_takes(base: str, kinds: Iterable[Kind], rank: int, targets: Collection[str]) -> str:
    """What stands in the way of an adapter that none of ``kinds`` takes."""
    reasons = dict.fromkeys(kind.lacks(rank, targets) for kind in sorted(kinds, key=lambda kind: kind.backend))
    return f"no engine of {base} takes this adapter: {'; '.join(reasons)}"


class Deployment(msgspec.Struct, frozen=True):
    """The engines of one node that run one base (same name and fingerprint), summed up for placement.

    ``kinds`` are the sorts of engines that it has, one of which must take an adapter; ``slots``, ``free_slots``,
    ``outstanding`` (leases) and ``serving`` count those that are ready. ``spare`` slots are free, or have an adapter
    that nobody uses. ``weight`` is its share of a policy's order: its slots, at least 1.
    """

    base: str
    fingerprint: str
    ready: int
    kinds: tuple[Kind, ...]
    slots: int
    free_slots: int
    spare: int
    outstanding: int
    serving: frozenset[str]

    @classmethod
    def of(cls, engines: Iterable[EngineReport]) -> Self:
        """Sum up ``engines``, of which there is at least one, all with the same base and fingerprint."""
        known = list(engines)
        ready = [engine for engine in known if engine.health is Health.READY]
        free = sum(max(0, engine.slots - len(engine.serving) - engine.changing) for engine in ready)
        return cls(
            base=known[0].base,
            fingerprint=known[0].fingerprint,
            ready=len(ready),
            kinds=_kinds(known),
            slots=sum(engine.slots for engine in ready),
            free_slots=free,
            spare=free + sum(engine.leases.count(0) for engine in ready),
            outstanding=sum(engine.outstanding for engine in ready),
            serving=frozenset().union(*(engine.serving for engine in ready)),
        )

    @property
    def weight(self) -> int:
        return max(1, self.slots)


def _kinds(engines: Iterable[EngineReport]) -> tuple[Kind, ...]:
    """Each sort once: as ready where any engine of it is."""
    ready: dict[tuple[str, int, frozenset[str]], bool] = {}
    for kind in map(Kind.of, engines):
        ready[kind[:3]] = ready.get(kind[:3], False) or kind.ready
    return tuple(Kind(*about, is_ready) for about, is_ready in ready.items())


class Share(msgspec.Struct):
    """What the nodes that take work have of one base, or one of them has: ``adapters`` serve or are being loaded."""

    ready: int = 0
    slots: int = 0
    outstanding: int = 0
    adapters: int = 0

    def add(self, other: Share, times: int = 1) -> None:
        self.ready += times * other.ready
        self.slots += times * other.slots
        self.outstanding += times * other.outstanding
        self.adapters += times * other.adapters


NOTHING = Share()


def apportioned(count: int, deployments: Mapping[Deployed, Deployment]) -> dict[Deployed, int]:
    """``count`` loads of a node, of which nobody knows what base each is for, dealt to its bases by their slots."""
    slots = sum(deployment.weight for deployment in deployments.values())
    dealt = {key: count * deployment.weight // slots for key, deployment in deployments.items()}
    rest = count - sum(dealt.values())
    for key in sorted(dealt)[:rest]:
        dealt[key] += 1
    return dealt
