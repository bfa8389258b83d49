"""The engines of a node that run one base, summed up, and what nodes have of that base."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self

import msgspec

from wire.node import EngineReport, Health

Deployed = tuple[str, str]
"""A base as deployed: its name and its fingerprint."""


class Deployment(msgspec.Struct, frozen=True):
    """The engines of one node that run one base (same name and fingerprint), summed up for placement.

    ``max_rank`` and ``targets`` are the most that any of them takes, so that a node is passed over only where no
    engine fits; ``slots``, ``free_slots``, ``outstanding`` (leases) and ``serving`` count those that are ready.
    ``spare`` slots are free, or have an adapter that nobody uses. ``weight`` is its share of a policy's order: its
    slots, at least 1.
    """

    base: str
    fingerprint: str
    ready: int
    max_rank: int
    targets: frozenset[str]
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
            max_rank=max(engine.max_rank for engine in known),
            targets=frozenset().union(*(engine.targets for engine in known)),
            slots=sum(engine.slots for engine in ready),
            free_slots=free,
            spare=free + sum(engine.leases.count(0) for engine in ready),
            outstanding=sum(engine.outstanding for engine in ready),
            serving=frozenset().union(*(engine.serving for engine in ready)),
        )

    @property
    def weight(self) -> int:
        return max(1, self.slots)


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
