"""How far this host's view of the catalog is: who wrote on another host can wait until he is read on this one."""

from __future__ import annotations

import msgspec
from aiohttp import web

from wire.outcomes import QuotaExceeded
from wire.registrar import AwaitPosition

from .described import Description, Query, described
from .requests import answer, caller, whole_number
from .services import services

routes = web.RouteTableDef()

_MAX_WAIT_S = 60
# the answer has this long to come after the wait itself
_MARGIN_S = 5.0


class PositionDocument(msgspec.Struct, frozen=True):
    """The newest event that this host's view has."""

    position: int


@routes.get("/roost/v1/catalog/position")
@described(
    Description(
        PositionDocument,
        query=(
            Query("reached", "Wait until the view has this event: the seq of a committed answer.", numeric=True),
            Query("timeout_s", "How long to wait, up to 60; 10 unless given.", numeric=True),
        ),
    )
)
async def position(request: web.Request) -> web.Response:
    """The position of this host's view, once it is where the query wants it; a deadline passed if that takes longer."""
    caller(request)
    seq = whole_number(request, "reached", 0)
    timeout_s = whole_number(request, "timeout_s", 10, most=_MAX_WAIT_S)
    shared = services(request)
    if shared.waits.locked():
        raise QuotaExceeded("this gateway has as many requests that wait for a position as it takes", retry_after_s=1.0)
    async with shared.waits:
        found = await shared.registrar.run(AwaitPosition(seq=seq, timeout_s=timeout_s), timeout_s=timeout_s + _MARGIN_S)
    return answer(PositionDocument(found.position))
