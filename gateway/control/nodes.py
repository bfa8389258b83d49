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

DRAINED, SERVING = "drained", "serving"
# a drain is over in either: somebody may put the node back into service meanwhile
_SETTLED = frozenset({DRAINED, SERVING})


@routes.get(_PATH)
@described(Description(NodeList, scope=Scope.ADMIN, fleet=True))
async def list_nodes(request: web.Request) -> web.Response:
    """The nodes of the fleet, as this gateway sees them."""
    _require_operator(request)
    shared = services(request)
    addresses = _endpoints(shared)
    nodes = [_document(node, addresses) for node in sorted(shared.nodes, key=lambda node: node.name)]
    troubles = (shared.members.trouble, *shared.fleet.troubles)
    return answer(NodeList(nodes, "; ".join(filter(None, troubles))))


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
    return await _cordon(request, on=True)


@routes.post(_PATH + "/{name}/uncordon")
@described(Description(NodeDocument, body=NoFields, scope=Scope.ADMIN, fleet=True))
async def uncordon_node(request: web.Request) -> web.Response:
    """Put a node back into service."""
    return await _cordon(request, on=False)


@routes.post(_PATH + "/{name}/drain")
@described(Description(NodeDocument, body=DrainBody, scope=Scope.ADMIN, fleet=True))
async def drain_node(request: web.Request) -> web.Response:
    """Cordon a node, and wait for the requests there to end; its state says whether they have."""
    _require_operator(request)
    wait_s = (await read_body(request, DrainBody)).wait_s
    await services(request).fleet.cordon(request.match_info["name"], on=True)
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s
    while (told := _told(request)).state not in _SETTLED and loop.time() < until:  # noqa: ASYNC110 - a report is awaited
        await asyncio.sleep(_LOOK_EVERY_S)
    return answer(told)


async def _cordon(request: web.Request, *, on: bool) -> web.Response:
    _require_operator(request)
    await read_body(request, NoFields)
    await services(request).fleet.cordon(request.match_info["name"], on=on)
    return answer(_told(request))


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
        loads_limit=node.loads_limit,
        queued_by_tenant=node.queued_by_tenant,
        load_s=node.load_s,
        load_rate=node.load_rate,
        resident=len(node.resident),
        arrived_bytes=node.arrived_bytes,
        given_bytes=node.given_bytes,
        peer_faults=node.peer_faults,
    )


def _state(node: Node) -> str:
    if not node.reported:
        return "joining"
    if not node.heard:
        return "silent"
    if node.doubtful:
        return "doubtful"
    if node.draining:
        # a load ends in a lease
        under_way = node.outstanding or node.leased or node.loads_in_flight or node.loads_queued
        return "cordoned" if under_way else DRAINED
    return SERVING
