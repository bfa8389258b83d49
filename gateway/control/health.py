"""Whether the gateway lives, whether it can serve, and what it counts. No key is asked for."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.http import told_to_clients
from gateway.metrics import exposition
from wire.outcomes import JournalUnavailable

from .described import Description, described
from .requests import answer
from .services import services

routes = web.RouteTableDef()


@routes.get("/healthz")
@described(Description(dict[str, bool], public=True))
async def healthz(request: web.Request) -> web.Response:
    """200 for as long as the process answers."""
    return answer({"ok": True})


@routes.get("/readyz")
@described(Description(dict[str, Any], public=True))
async def readyz(request: web.Request) -> web.Response:
    """200 once the catalog is open and an engine is ready; else 503 and what is missing."""
    shared = services(request)
    missing = []
    try:
        shared.view.position()
    except JournalUnavailable as error:
        missing.append(told_to_clients(error))
    if shared.nodes.ready_engines() == 0:
        missing.append("no node has a ready engine")
    return answer({"ready": not missing, "missing": missing}, status=503 if missing else 200)


@routes.get("/metrics")
@described(Description("text/plain", public=True))
async def metrics(request: web.Request) -> web.Response:
    """Prometheus' text format."""
    return web.Response(
        body=exposition(services(request).collector),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )
