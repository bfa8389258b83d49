"""The fleet's nodes: what they do, and taking one out of service and back in. For those who run the fleet."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gateway.nodes import Node
from wire.events import Scope
from wire.node import Health
from wire.outcomes import Forbidden, NotFound

from .bodies import DrainBody, NoFields
from .described import Description, described
from .documents import NodeDocument, NodeList
from .requests import answer, read_body, require
from .services import Services, services

routes = web.RouteTableDef()

_PATH = "/roost/v1/nodes"
_LOOK_EVERY_S = 0.05

DRAINED = "drained"


@routes.get(_PATH)
@described(Description(NodeList, scope=Scope.ADMIN, fleet=True))
async def list_nodes(request: web.Request) -> web.Response:
    """The nodes of the fleet, as this gateway sees them."""
    _require_operator(request)
    shared = services(request)
    addresses = _endpoints(shared)
    nodes = [_document(node, addresses) for node in sorted(shared.nodes, key=lambda node: node.name)]
    return answer(NodeList(nodes, shared.members.trouble))


@routes.get(_PATH + "/{name}")
@described(Description(NodeDocument, scope=Scope.ADMIN, fleet=True))
async def show_node(request: web.Request) -> web.Response:
    """One node."""
    _require_operator(request)
    return answer(_told(request))


@routes.post(_PATH + "/{name}/cordon")
@described(Description(NodeDocument, body=NoFields, scope=Scope.ADMIN, fleet=True))
async def cordon_node(request: web.Request) -> web.Response:
    """Send a node nothing new, from any gateway, until it is uncordoned; what is under way there goes on."""
    _require_operator(request)
    await read_body(request, NoFields)
    await services(request).fleet.cordon(request.match_info["name"], on=True)
    return answer(_told(request))


@routes.post(_PATH + "/{name}/uncordon")
@described(Description(NodeDocument, body=NoFields, scope=Scope.ADMIN, fleet=True))
async def uncordon_node(request: web.Request) -> web.Response:
    """Put a node back into service."""
    _require_operator(request)
    await read_body(request, NoFields)
    await services(request).fleet.cordon(request.match_info["name"], on=False)
    return answer(_told(request))


@routes.post(_PATH + "/{name}/drain")
@described(Description(NodeDocument, body=DrainBody, scope=Scope.ADMIN, fleet=True))
async def drain_node(request: web.Request) -> web.Response:
    """Cordon a node, and wait for the requests there to end; its state says whether they have."""
    _require_operator(request)
    wait_s = (await read_body(request, DrainBody)).wait_s
    await services(request).fleet.cordon(request.match_info["name"], on=True)
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s
    while (told := _told(request)).state != DRAINED and loop.time() < until:  # noqa: ASYNC110 - a node's report is awaited
        await asyncio.sleep(_LOOK_EVERY_S)
    return answer(told)


def _require_operator(request: web.Request) -> None:
    if not require(request, Scope.ADMIN).operates:
        raise Forbidden("nodes are no tenant's: this needs an admin key of all tenants")


def _endpoints(shared: Services) -> dict[str, str]:
    return {address.name: address.endpoint for address in shared.fleet.addresses}


def _told(request: web.Request) -> NodeDocument:
    shared = services(request)
    name = request.match_info["name"]
    node = shared.nodes.get(name)
    if node is None:
        raise NotFound(f"there is no node {name[:64]}", field="name")
    return _document(node, _endpoints(shared))


def _document(node: Node, endpoints: dict[str, str]) -> NodeDocument:
    ready = [engine for engine in node.engines.values() if engine.health is Health.READY]
    return NodeDocument(
        node=node.name,
        state=_state(node),
        endpoint=endpoints.get(node.name, ""),
        bases=tuple(sorted({engine.base for engine in node.engines.values()})),
        engines=len(node.engines),
        engines_ready=len(ready),
        slots=sum(engine.slots for engine in ready),
        slots_used=sum(len(engine.serving) + engine.changing for engine in ready),
        leases=node.outstanding,
        own_leases=node.leased,
        loads_in_flight=node.loads_in_flight,
        loads_queued=node.loads_queued,
        load_s=node.load_s,
        resident=len(node.resident),
    )


def _state(node: Node) -> str:
    if not node.reported:
        return "joining"
    if not node.heard:
        return "silent"
    if node.doubtful:
        return "doubtful"
    if node.draining:
        # a load that had begun ends in a lease
        return "cordoned" if node.outstanding or node.leased or node.loads_in_flight else DRAINED
    return "serving"
