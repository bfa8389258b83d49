"""Which nodes can take a request at all. The filter that leaves no node says why there is none."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gateway.nodes import Node
from wire.outcomes import BaseNotDeployed, NoHealthyNode, RoostError, Unfit

from .demand import Demand

RETRY_AFTER_S = 2.0


class Filter(msgspec.Struct, frozen=True):
    """``keeps`` decides on a node; ``refusal`` is raised where it keeps none."""

    keeps: Callable[[Node, Demand], bool]
    refusal: Callable[[Demand], RoostError]


def _has_reported(node: Node, demand: Demand) -> bool:
    return node.reported


def _deploys_name(node: Node, demand: Demand) -> bool:
    return demand.base in node.base_names


def _deploys_base(node: Node, demand: Demand) -> bool:
    return node.deployment(demand.base, demand.fingerprint) is not None


def _fits_rank(node: Node, demand: Demand) -> bool:
    deployment = node.deployment(demand.base, demand.fingerprint)
    return deployment is not None and demand.rank <= deployment.max_rank


def _fits_targets(node: Node, demand: Demand) -> bool:
    deployment = node.deployment(demand.base, demand.fingerprint)
    return deployment is not None and (not deployment.targets or deployment.targets.issuperset(demand.targets))


def _is_healthy(node: Node, demand: Demand) -> bool:
    deployment = node.deployment(demand.base, demand.fingerprint)
    return node.heard and deployment is not None and deployment.ready > 0


def _takes_new_work(node: Node, demand: Demand) -> bool:
    return not node.draining


def _none_reported(demand: Demand) -> RoostError:
    return NoHealthyNode("no node has reported yet", retry_after_s=RETRY_AFTER_S)


def _not_deployed(demand: Demand) -> RoostError:
    return BaseNotDeployed(f"no node runs the base {demand.base}", retry_after_s=RETRY_AFTER_S)


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
    Filter(_has_reported, _none_reported),
    Filter(_deploys_name, _not_deployed),
    Filter(_deploys_base, _another_build),
    Filter(_fits_rank, _rank_too_large),
    Filter(_fits_targets, _targets_unsupported),
    Filter(_is_healthy, _unhealthy),
    Filter(_takes_new_work, _all_draining),
)
