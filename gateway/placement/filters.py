"""Which nodes can take a request at all. The filter that leaves no node says why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from gateway.deployments import Deployment, why_none_takes
from gateway.nodes import Node
from wire.outcomes import BaseNotDeployed, NoHealthyNode, RoostError, Unfit

from .demand import Demand

RETRY_AFTER_S = 2.0

Keeps = Callable[[Node, Deployment, Demand], bool]


class Filter(msgspec.Struct, frozen=True):
    """``keeps`` decides on a node by itself and its deployment of the base; ``refusal`` is the error if all of the
    deployments that came so far fail.
    """

    keeps: Keeps
    refusal: Callable[[Demand, Sequence[Deployment]], RoostError]


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
        kept = [(node, deployment) for node, deployment in left if rule.keeps(node, deployment, demand)]
        if not kept:
            return rule.refusal(demand, [deployment for _, deployment in left])
        left = kept
    raise ValueError("some node is eligible")


def _fits(node: Node, deployment: Deployment, demand: Demand) -> bool:
    for kind in deployment.kinds:  # noqa: SIM110 - a generator costs more than the kinds
        if kind.backend != demand.not_by and kind.takes(demand.rank, demand.targets):
            return True
    return False


def _is_healthy(node: Node, deployment: Deployment, demand: Demand) -> bool:
    if node.heard:
        for kind in deployment.kinds:
            if kind.ready and kind.backend != demand.not_by and kind.takes(demand.rank, demand.targets):
                return True
    return False


def _takes_new_work(node: Node, deployment: Deployment, demand: Demand) -> bool:
    return not node.draining


def _another_build(demand: Demand) -> RoostError:
    return BaseNotDeployed(
        f"the nodes run another model under the name {demand.base}: its fingerprint differs from the registered one"
    )


def _unfit(demand: Demand, deployments: Sequence[Deployment]) -> RoostError:
    kinds = (kind for deployment in deployments for kind in deployment.kinds)
    return Unfit(why_none_takes(demand.base, kinds, demand.rank, demand.targets), field="model")


def _unhealthy(demand: Demand, _: Sequence[Deployment]) -> RoostError:
    return NoHealthyNode(f"no healthy node serves {demand.base} now", retry_after_s=RETRY_AFTER_S)


def _all_draining(demand: Demand, _: Sequence[Deployment]) -> RoostError:
    return NoHealthyNode(f"every node that serves {demand.base} is draining", retry_after_s=RETRY_AFTER_S)


FILTERS: tuple[Filter, ...] = (
    Filter(_fits, _unfit),
    Filter(_is_healthy, _unhealthy),
    Filter(_takes_new_work, _all_draining),
)
