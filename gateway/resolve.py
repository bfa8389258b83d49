"""What a request's ``model`` stands for: a revision of a policy, or a base itself."""

from __future__ import annotations

import msgspec

from catalog.names import check_base, parse_reference
from catalog.view import CatalogView
from wire.events import Scope
from wire.outcomes import NotFound

from .auth import ALL_TENANTS, Caller
from .placement import Demand


class Target(msgspec.Struct, frozen=True):
    """What is to be placed and leased. ``shown`` is the concrete name that the client is told.

    ``salt`` keeps the prefix caches of tenants that share a base apart; an adapter's name does it by itself.
    ``size`` in bytes of the revision file, 0 for a base.
    """

    demand: Demand
    shown: str
    size: int = 0
    salt: str = ""


def resolve(view: CatalogView, caller: Caller, model: str, *, selector: bytes) -> Target:
    """The target of ``model`` for ``caller``. Raises Forbidden before it looks anything up, NotFound, Retired.

    ``selector`` decides between the arms of a weighted channel.
    """
    if "/" not in model:
        return _resolve_base(view, caller, model)
    reference = parse_reference(model)
    caller.require(Scope.INVOKE, reference.tenant)
    found = view.resolve(reference, selector=selector)
    demand = Demand(
        base=found.base,
        fingerprint=found.base_fingerprint,
        policy=found.policy,
        tenant=found.tenant,
        digest=found.digest,
        rank=found.rank,
        targets=found.targets,
    )
    return Target(demand, found.reference, found.size)


def _resolve_base(view: CatalogView, caller: Caller, model: str) -> Target:
    caller.require(Scope.INVOKE)
    base = view.base(check_base(model, "model"))
    if base is None:
        raise NotFound(f"there is no base {model}; a policy is named tenant/name", field="model")
    salt = "" if caller.tenant == ALL_TENANTS else caller.tenant
    return Target(Demand(base=base.name, fingerprint=base.fingerprint), base.name, salt=salt)
