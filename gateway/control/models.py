"""OpenAI's list of models, in pages: bases first, then the policies of the key's tenant."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from catalog.names import check_base, parse_reference
from catalog.records import BaseRecord, PolicyRecord
from catalog.view import CatalogView
from gateway.auth import ALL_TENANTS, Caller
from wire.events import Scope
from wire.outcomes import NotFound

from .described import AFTER, LIMIT, Description, described
from .requests import Page, answer, page, require
from .services import services

routes = web.RouteTableDef()

Model = dict[str, Any]


@routes.get("/v1/models")
@described(Description(Model, scope=Scope.INVOKE, query=(AFTER, LIMIT)))
async def list_models(request: web.Request) -> web.Response:
    """List models, a page at a time: ``after`` is the last id of the page before."""
    asker = require(request, Scope.INVOKE)
    asked = page(request)
    found = _models_after(services(request).view, asker, Page(asked.after, asked.limit + 1))
    shown = found[: asked.limit]
    return answer(
        {
            "object": "list",
            "data": shown,
            "has_more": len(found) > asked.limit,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
        }
    )


@routes.get("/v1/models/{id:.+}")
@described(Description(Model, scope=Scope.INVOKE))
async def show_model(request: web.Request) -> web.Response:
    """Any base, policy, revision or channel by the name that a request would use."""
    asker = require(request, Scope.INVOKE)
    view = services(request).view
    name = request.match_info["id"]
    if "/" not in name:
        base = view.base(check_base(name, "model"))
        if base is None:
            raise NotFound(f"there is no base {name}", field="model")
        return answer(_base_model(base))
    reference = parse_reference(name)
    asker.require(Scope.INVOKE, reference.tenant)
    found = view.resolve(reference)
    policy = view.policy(found.policy)
    if policy is None:
        raise NotFound(f"there is no policy {found.policy}", field="model")
    return answer(_policy_model(policy) | {"id": name, "root": found.reference})


def _models_after(view: CatalogView, asker: Caller, asked: Page) -> list[Model]:
    models: list[Model] = []
    after = asked.after
    if "/" not in after:
        bases = sorted(view.bases(), key=lambda base: base.name)
        models = [_base_model(base) for base in bases if base.name > after][: asked.limit]
        after = ""
    prefix = "" if asker.tenant == ALL_TENANTS else f"{asker.tenant}/"
    while len(models) < asked.limit:
        policies = view.policies(prefix=prefix, after=after, limit=asked.limit - len(models))
        if not policies:
            break
        models.extend(_policy_model(policy) for policy in policies if not policy.retired)
        after = policies[-1].policy
    return models


def _base_model(base: BaseRecord) -> Model:
    return _model(base.name, base.created_ms, "roost", None)


def _policy_model(policy: PolicyRecord) -> Model:
    return _model(policy.policy, policy.created_ms, policy.policy.partition("/")[0], policy.base)


def _model(name: str, created_ms: int, owner: str, parent: str | None) -> Model:
    return {"id": name, "object": "model", "created": created_ms // 1000, "owned_by": owner, "parent": parent}
