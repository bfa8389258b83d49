"""The fleet as this gateway sees it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

from aiohttp import web

from catalog.names import split_adapter_name
from catalog.records import PolicyRecord
from catalog.view import CatalogView
from gateway.auth import Caller
from gateway.http import told_to_clients
from gateway.nodes import Node
from wire.events import Scope
from wire.node import EngineReport
from wire.outcomes import JournalUnavailable

from .described import Description, described
from .requests import answer, require
from .services import Services, services

routes = web.RouteTableDef()

# policies of a tenant that are looked through for the names of what its engines serve
_POLICIES_LOOKED_AT = 1000

_PRIVATE_RE = re.compile(r"(?<![\w/.])/[^\s'\"]+|(?<![\w.-])[\w.-]+:\d{2,5}\b|\[[0-9a-fA-F:]+\]:\d+")

References = dict[tuple[str, str], list[str]]


@routes.get("/roost/v1/status")
@described(Description(dict[str, Any], scope=Scope.ADMIN))
async def status(request: web.Request) -> web.Response:
    """Nodes, engines, what their slots hold, and the catalog's position. Other tenants' adapters are left out."""
    asker = require(request, Scope.ADMIN)
    shared = services(request)
    tenants = {tenant for node in shared.nodes for tenant in _tenants_of(node) if asker.reaches(tenant)}
    references = await shared.scans.run(find_references, shared.view, tenants)
    nodes = [_node_document(node, asker, references) for node in shared.nodes]
    return answer({"gateway": shared.gateway, "catalog": _catalog_document(shared, asker), "nodes": nodes})


def find_references(view: CatalogView, tenants: set[str]) -> References:
    """Names, by (tenant, digest), of the revisions that channels point to; for a bounded number of policies."""
    references: References = defaultdict(list)
    for tenant in tenants:
        for record in view.policies(prefix=f"{tenant}/", limit=_POLICIES_LOOKED_AT):
            for number in sorted(_pointed_at(record)):
                revision = view.revision(record.policy, number)
                if revision is not None:
                    references[tenant, revision.artifact.digest].append(f"{record.policy}@{number}")
    return references


def _pointed_at(record: PolicyRecord) -> set[int]:
    numbers = {split.revision for target in record.channels.values() for split in target}
    return numbers | ({record.latest} if record.latest else set())


def _tenants_of(node: Node) -> set[str]:
    names = (split_adapter_name(adapter) for engine in node.engines.values() for adapter in engine.serving)
    return {name[0] for name in names if name is not None}


def _catalog_document(shared: Services, asker: Caller) -> dict[str, Any]:
    try:
        return {"position": shared.view.position()}
    except JournalUnavailable as error:
        return {"error": error.message if asker.operates else told_to_clients(error)}


def _node_document(node: Node, asker: Caller, references: References) -> dict[str, Any]:
    return {
        "node": node.name,
        "heard": node.heard and not node.doubtful,
        "draining": node.draining,
        "arena_bytes": node.arena_bytes,
        "arena_used": node.arena_used,
        "loads_in_flight": node.loads_in_flight,
        "loads_queued": node.loads_queued,
        "loads_limit": node.loads_limit,
        "load_s": node.load_s,
        "load_rate": node.load_rate,
        "queued_by_tenant": {tenant: count for tenant, count in node.queued_by_tenant.items() if asker.reaches(tenant)},
        "fetches": node.fetches,
        "installs": node.installs,
        "rejected": node.rejected,
        "resident": Counter(state.value for state in node.resident.values()),
        "engines": [_engine_document(engine, asker, references) for engine in node.engines.values()],
    }


def clients_share(detail: str) -> str:
    """What a tenant may know of an engine's trouble: no log, which tells of other tenants, and no path or address."""
    return _PRIVATE_RE.sub("...", detail.partition("\n")[0])


def _engine_document(engine: EngineReport, asker: Caller, references: References) -> dict[str, Any]:
    document = {name: getattr(engine, name) for name in engine.__struct_fields__}
    if not asker.operates:
        document["detail"] = clients_share(engine.detail)
    document["slots_used"] = len(engine.serving)
    document["serving"] = [
        {"adapter": adapter, "tenant": name[0], "digest": name[1], "references": references.get(name, [])}
        for adapter in engine.serving
        if (name := split_adapter_name(adapter)) is not None and asker.reaches(name[0])
    ]
    return document
