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
    """List models, a page at a time: ``after`` is the ``last_id`` of the page before, which may be empty itself."""
    asker = require(request, Scope.INVOKE)
    shared = services(request)
    models, after = await shared.scans.run(_models_after, shared.view, asker, page(request))
    return answer(
        {
            "object": "list",
            "data": models,
            "has_more": bool(after),
            "first_id": models[0]["id"] if models else None,
            "last_id": after or (models[-1]["id"] if models else None),
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
    policy = view.policy(reference.policy)
    if policy is None:
        raise NotFound(f"there is no policy {reference.policy}", field="model")
    if name == reference.policy and not policy.latest and not policy.retired:
        # listed, though it can't answer before its first revision
        return answer(_policy_model(policy) | {"id": name, "root": policy.policy})
    return answer(_policy_model(policy) | {"id": name, "root": view.resolve(reference).reference})


def _models_after(view: CatalogView, asker: Caller, asked: Page) -> tuple[list[Model], str]:
    """A page, and where the next one begins; empty at the end."""
    models: list[Model] = []
    after = asked.after
    if "/" not in after:
        bases = sorted(view.bases(), key=lambda base: base.name)
        models = [_base_model(base) for base in bases if base.name > after]
        after = ""
    room = asked.limit - len(models)
    if room < 0:
        return models[:room], models[room - 1]["id"]
    prefix = "" if asker.tenant == ALL_TENANTS else f"{asker.tenant}/"
    found = view.search(prefix=prefix, live=True, after=after, limit=max(room, 1))
    if room == 0:
        return models, models[-1]["id"] if found.policies or found.after else ""
    return [*models, *(_policy_model(policy) for policy in found.policies)], found.after


def _base_model(base: BaseRecord) -> Model:
    return _model(base.name, base.created_ms, "roost", None)


def _policy_model(policy: PolicyRecord) -> Model:
    return _model(policy.policy, policy.created_ms, policy.policy.partition("/")[0], policy.base)


def _model(name: str, created_ms: int, owner: str, parent: str | None) -> Model:
    return {"id": name, "object": "model", "created": created_ms // 1000, "owned_by": owner, "parent": parent}
