"""How well a node suits a request, between 0 and 1 each, from reports alone."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gateway.nodes import Deployment, Node

from .demand import Demand

_HALVING_LEASES = 32


class Scorer(msgspec.Struct, frozen=True):
    """``score`` is clamped to 0..1 and counts ``weight`` times."""

    score: Callable[[Node, Deployment, Demand], float]
    weight: float


def serving(node: Node, deployment: Deployment, demand: Demand) -> float:
    """1 where the revision is in a slot: nothing has to be moved."""
    return 1.0 if demand.adapter in deployment.serving else 0.0


def resident(node: Node, deployment: Deployment, demand: Demand) -> float:
    """1 where the revision's bytes are on the node: nothing has to be fetched."""
    return 1.0 if node.holds(demand.digest) else 0.0


def free_slot(node: Node, deployment: Deployment, demand: Demand) -> float:
    """1 where a slot is empty: nothing has to be evicted."""
    return 1.0 if deployment.free_slots > 0 else 0.0


def idleness(node: Node, deployment: Deployment, demand: Demand) -> float:
    """Falls from 1 by outstanding leases an engine, halved for every ``_HALVING_LEASES`` of them, in whole steps.

    In steps, because a lease more or less is noise and must not move a policy.
    """
    return 0.5 ** (deployment.outstanding // (max(1, deployment.ready) * _HALVING_LEASES))


# Serving outweighs all the rest together: spreading a policy over more nodes is decided by how many candidates it
# gets, not here. Resident bytes outweigh an empty slot: an eviction is cheaper than a fetch.
SCORERS: tuple[Scorer, ...] = (
    Scorer(serving, 1.0),
    Scorer(resident, 0.4),
    Scorer(free_slot, 0.2),
    Scorer(idleness, 0.3),
)


def total(node: Node, demand: Demand) -> float:
    """The weighted sum of all scores; 0 for a node that does not run the base."""
    deployment = node.deployment(demand.base, demand.fingerprint)
    if deployment is None:
        return 0.0
    score = 0.0
    for scorer in SCORERS:
        score += scorer.weight * min(1.0, max(0.0, scorer.score(node, deployment, demand)))
    return score
