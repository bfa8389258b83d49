"""Results. Who asks early waits here: an answer of "not yet" would bring him back at once."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.training.answers import PROTOBUF, answer
from gateway.training.records import OperationRecord
from wire.events import Scope
from wire.outcomes import NotFound, Retired

from . import bodies
from .services import Services, caller, services

routes = web.RouteTableDef()

_NOT_YET = 408
_GONE = 410
_MAX_BODY_BYTES = 1 << 16


@routes.post("/api/v1/retrieve_future")
async def retrieve_future(request: web.Request) -> web.Response:
    """The result; 408 where there is none in time, 410 where it was kept long enough."""
    asker = caller(request, Scope.INVOKE)
    shared = services(request)
    asked = bodies.decode(await bodies.read_bytes(request, _MAX_BODY_BYTES), bodies.Retrieve)
    operation = shared.journal.operation(asked.request_id)
    if operation is None or not asker.reaches(operation.tenant):
        raise NotFound("there is no such request", field="request_id")
    try:
        result = shared.journal.result(operation.request_id)
        if result is None:
            await shared.futures.wait(operation.request_id, shared.settings.poll_s)
            result = shared.journal.result(operation.request_id)
    except Retired as error:
        return web.json_response({"error": error.message, "category": "user"}, status=_GONE)
    if result is None:
        body = msgspec.json.encode(await _not_yet(shared, operation))
        return web.Response(status=_NOT_YET, body=body, content_type="application/json")
    content_type, body = answer(result, protobuf=PROTOBUF in request.headers.get("Accept", ""))
    return web.Response(body=body, content_type=content_type)


async def _not_yet(shared: Services, operation: OperationRecord) -> dict[str, str]:
    """What a client may show its user meanwhile."""
    sampled = shared.journal.sampler(operation.owner) is not None
    why = shared.samples.paused if sampled else await shared.trainees.paused()
    document = {"type": "try_again", "request_id": operation.request_id, "queue_state": "active"}
    if why:
        document |= {"queue_state": "paused_capacity", "queue_state_reason": why}
    return document
