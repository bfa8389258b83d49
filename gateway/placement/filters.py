"""Which nodes can take a request at all. The filter that leaves no node says why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from gateway.deployments import Deployment
from gateway.nodes import Node
from wire.outcomes import BaseNotDeployed, NoHealthyNode, RoostError, Unfit

from .demand import Demand

RETRY_AFTER_S = 2.0

Keeps = Callable[[Node, Deployment, Demand], bool]


class Filter(msgspec.Struct, frozen=True):
    """``keeps`` decides on a node by itself and its deployment of the base; ``refusal`` is the error if all fail."""

    keeps: Keeps
    refusal: Callable[[Demand], RoostError]


def eligible(node: Node, demand: Demand) -> bool:
    """Whether ``node`` can take the request."""
    deployment = node.deployment(demand.base, demand.fingerprint)
    if deployment is None:
        return False
    for rule in FILTERS:  # noqa: SIM110 - a generator costs more than the filters
        if not rule.keeps(node, deployment, demand):
            return False
    return True


def refusal(nodes: Iterable[Node], demand: Demand) -> RoostError:
    """Why none of ``nodes`` is eligible: what the last filter that some nodes reached says."""
    known = [node for node in nodes if node.reported]
    if not known:
        return NoHealthyNode("no node has reported yet", retry_after_s=RETRY_AFTER_S)
    if not any(demand.base in node.base_names for node in known):
        return BaseNotDeployed(f"no node runs the base {demand.base}", retry_after_s=RETRY_AFTER_S)
    found = [(node, node.deployment(demand.base, demand.fingerprint)) for node in known]
    left = [(node, deployment) for node, deployment in found if deployment is not None]
    if not left:
        return _another_build(demand)
    for rule in FILTERS:
        left = [(node, deployment) for node, deployment in left if rule.keeps(node, deployment, demand)]
        if not left:
            return rule.refusal(demand)
    raise ValueError("some node is eligible")


def _fits_rank(node: Node, deployment: Deployment, demand: Demand) -> bool:
    return demand.rank <= deployment.max_rank


def _fits_targets(node: Node, deployment: Deployment, demand: Demand) -> bool:
    return not deployment.targets or deployment.targets.issuperset(demand.targets)


def _is_healthy(node: Node, deployment: Deployment, demand: Demand) -> bool:
    return node.heard and deployment.ready > 0


def _takes_new_work(node: Node, deployment: Deployment, demand: Demand) -> bool:
    return not node.draining


def _another_build(demand: Demand) -> RoostError:
    return BaseNotDeployed(
        f"the nodes run another model under the name {demand.base}: its fingerprint differs from the registered one"
    )


def _rank_too_large(demand: Demand) -> RoostError:
    return Unfit(f"rank {demand.rank} is above what any engine of {demand.base} takes", field="model")


def _targets_unsupported(demand: Demand) -> RoostError:
    return Unfit(f"no engine of {demand.base} adapts all of {', '.join(demand.targets)}", field="model")


def _unhealthy(demand: Demand) -> RoostError:
    return NoHealthyNode(f"no healthy node serves {demand.base} now", retry_after_s=RETRY_AFTER_S)


def _all_draining(demand: Demand) -> RoostError:
    return NoHealthyNode(f"every node that serves {demand.base} is draining", retry_after_s=RETRY_AFTER_S)


FILTERS: tuple[Filter, ...] = (
    Filter(_fits_rank, _rank_too_large),
    Filter(_fits_targets, _targets_unsupported),
    Filter(_is_healthy, _unhealthy),
    Filter(_takes_new_work, _all_draining),
)
