"""Policies: creating, looking at, rolling back and retiring them, and where their revisions' bytes are."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from catalog.names import STABLE, adapter_name, check_base, check_part, check_policy
from catalog.records import PolicyRecord, RevisionRecord
from gateway.auth import ALL_TENANTS
from gateway.nodes import Node, NodeTable
from wire.events import Scope
from wire.outcomes import NotFound
from wire.registrar import CreatePolicy, RetirePolicy, Rollback

from .requests import answer, caller, commit, page, read_body, require, whole_number
from .services import Services, services

routes = web.RouteTableDef()

POLICY = "/roost/v1/policies/{tenant}/{name}"


class NewPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    policy: str
    base: str


class Versioned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Acts only where the policy still has ``expected_version``, if one is given."""

    expected_version: int | None = None


class RollbackBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``to`` 0 means the revision before the one that ``channel`` has."""

    channel: str = STABLE
    to: int = 0
    expected_version: int | None = None


def policy_name(request: web.Request) -> str:
    """The policy that the path names. Raises InvalidRequest."""
    return check_policy(f"{request.match_info['tenant']}/{request.match_info['name']}")


@routes.post("/roost/v1/policies")
async def create_policy(request: web.Request) -> web.Response:
    asker = require(request, Scope.PUBLISH)
    new = await read_body(request, NewPolicy)
    policy = check_policy(new.policy)
    asker.require(Scope.PUBLISH, policy.partition("/")[0])
    return await commit(request, CreatePolicy(actor=asker.key_id, policy=policy, base=check_base(new.base)))


@routes.get("/roost/v1/policies")
async def list_policies(request: web.Request) -> web.Response:
    asker = caller(request)
    asked = page(request)
    prefix = request.query.get("prefix", "")
    own = "" if asker.tenant == ALL_TENANTS else f"{asker.tenant}/"
    if own and not prefix.startswith(own):
        # a shorter prefix asks for everything that begins with it, of which only the tenant's own is shown
        prefix = own if own.startswith(prefix) else own + prefix
    found = services(request).view.policies(prefix=prefix, after=asked.after, limit=asked.limit + 1)
    shown = [policy_document(record) for record in found[: asked.limit]]
    return answer({"policies": shown, "has_more": len(found) > asked.limit})


@routes.get(POLICY)
async def show_policy(request: web.Request) -> web.Response:
    record = _own_policy(request)
    revisions, has_more = _revisions(request, record.policy)
    shown = [revision_document(revision) for revision in revisions]
    return answer(policy_document(record) | {"revisions": shown, "has_more": has_more})


@routes.get(POLICY + "/where")
async def where(request: web.Request) -> web.Response:
    """For each revision: whether the store has it, which nodes have its bytes, which engines have it in a slot."""
    record = _own_policy(request)
    shared = services(request)
    revisions, has_more = _revisions(request, record.policy)
    tenant = record.policy.partition("/")[0]
    shown = [_whereabouts(shared, tenant, revision) for revision in revisions]
    return answer(
        {"policy": record.policy, "channels": record.channels, "revisions": shown, "has_more": has_more},
    )


@routes.get(POLICY + "/history")
async def history(request: web.Request) -> web.Response:
    record = _own_policy(request)
    return answer({"events": services(request).view.history(record.policy)})


@routes.post(POLICY + "/rollback")
async def roll_back(request: web.Request) -> web.Response:
    policy = policy_name(request)
    asker = require(request, Scope.PUBLISH, request.match_info["tenant"])
    body = await read_body(request, RollbackBody)
    command = Rollback(
        actor=asker.key_id,
        policy=policy,
        channel=check_part(body.channel, "channel"),
        to=body.to,
        expected_version=body.expected_version,
    )
    return await commit(request, command)


@routes.post(POLICY + "/retire")
async def retire(request: web.Request) -> web.Response:
    policy = policy_name(request)
    asker = require(request, Scope.PUBLISH, request.match_info["tenant"])
    body = await read_body(request, Versioned)
    return await commit(
        request, RetirePolicy(actor=asker.key_id, policy=policy, expected_version=body.expected_version)
    )


def policy_document(record: PolicyRecord) -> dict[str, Any]:
    """A policy as it is shown."""
    return {name: getattr(record, name) for name in record.__struct_fields__}


def revision_document(record: RevisionRecord) -> dict[str, Any]:
    """A revision as it is shown."""
    facts = record.artifact
    return {
        "revision": record.revision,
        **{name: getattr(facts, name) for name in facts.__struct_fields__},
        "provenance": record.provenance,
        "actor": record.actor,
        "published_ms": record.published_ms,
    }


def _own_policy(request: web.Request) -> PolicyRecord:
    name = policy_name(request)
    asker = caller(request)
    asker.require_tenant(request.match_info["tenant"])
    record = services(request).view.policy(name)
    if record is None:
        raise NotFound(f"there is no policy {name}", field="policy")
    return record


def _revisions(request: web.Request, policy: str) -> tuple[list[RevisionRecord], bool]:
    limit = page(request).limit
    after = whole_number(request, "after", 0)
    found = services(request).view.revisions(policy, after=after, limit=limit + 1)
    return found[:limit], len(found) > limit


def _whereabouts(shared: Services, tenant: str, record: RevisionRecord) -> dict[str, Any]:
    facts = record.artifact
    return {
        "revision": record.revision,
        "digest": facts.digest,
        "size": facts.size,
        "in_store": shared.store.size(facts.digest) is not None,
        "nodes": _on_nodes(shared.nodes, adapter_name(tenant, facts.digest), facts.digest),
    }


def _on_nodes(nodes: NodeTable, adapter: str, digest: str) -> list[dict[str, Any]]:
    return [
        {"node": node.name, "residency": node.resident.get(digest, "absent"), "engines": _engines_with(node, adapter)}
        for node in nodes
        if digest in node.resident or _engines_with(node, adapter)
    ]


def _engines_with(node: Node, adapter: str) -> list[str]:
    return [engine.engine for engine in node.engines.values() if adapter in engine.serving]
