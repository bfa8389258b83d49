"""Sessions, and what clients ask before they begin."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from aiohttp import web

from catalog.names import shown
from wire.events import Scope
from wire.node import Health
from wire.outcomes import InvalidRequest

from .bodies import NewSession, decode, read_bytes
from .services import caller, own_session, services

routes = web.RouteTableDef()

# in a run's or a session's metadata: what its policy is to be called
POLICY = "policy"
_MAX_BODY_BYTES = 1 << 20


class _Heartbeat(msgspec.Struct, frozen=True):
    session_id: str


class _Reason(msgspec.Struct, frozen=True):
    type: Literal["success", "errored", "interrupted"]


class _Finish(msgspec.Struct, frozen=True):
    reason: _Reason


def answer(document: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")


@routes.get("/api/v1/healthz")
async def healthz(request: web.Request) -> web.Response:
    return answer({"status": "ok"})


@routes.post("/api/v1/client/config")
async def client_config(request: web.Request) -> web.Response:
    """No switch of the SDK's needs another value than its own."""
    caller(request, Scope.INVOKE)
    return answer({})


@routes.post("/api/v1/telemetry")
async def telemetry(request: web.Request) -> web.Response:
    """Taken, and kept nowhere."""
    caller(request, Scope.INVOKE)
    await read_bytes(request, services(request).settings.max_body_bytes)
    return answer({"status": "accepted"})


@routes.post("/api/v1/create_session")
async def create_session(request: web.Request) -> web.Response:
    asker = caller(request, Scope.INVOKE)
    new = decode(await read_bytes(request, _MAX_BODY_BYTES), NewSession)
    shared = services(request)
    metadata = words(new.user_metadata)
    session = await shared.journal.open_session(shared.tenant_of(asker), asker.key_id, metadata)
    return answer({"type": "create_session", "session_id": session.session_id})


@routes.post("/api/v1/session_heartbeat")
async def session_heartbeat(request: web.Request) -> web.Response:
    """A session ends for nobody's silence: what it trained stays."""
    asker = caller(request, Scope.INVOKE)
    own_session(request, asker, decode(await read_bytes(request, _MAX_BODY_BYTES), _Heartbeat).session_id)
    return answer({"type": "session_heartbeat"})


@routes.post("/api/v1/sessions/{session_id}/finish")
async def finish_session(request: web.Request) -> web.Response:
    """The client is done: its runs end, and what they saved stays."""
    asker = caller(request, Scope.INVOKE)
    session = own_session(request, asker, request.match_info["session_id"])
    asked = decode(await read_bytes(request, _MAX_BODY_BYTES), _Finish)
    shared = services(request)
    for run in await shared.journal.finish(session.session_id, asked.reason.type):
        shared.lines.end(run.model_id)
    shared.retention.finished(session.session_id)
    return answer({"type": "finish_session"})


@routes.get("/api/v1/get_server_capabilities")
async def get_server_capabilities(request: web.Request) -> web.Response:
    """The base that is trained, and those that are only sampled from."""
    caller(request, Scope.INVOKE)
    shared = services(request)
    trained: dict[str, Any] = {"model_name": shared.settings.base, "trainable": True, "sampleable": True}
    if await shared.trainer.health() is Health.READY:
        trained["max_context_length"] = (await shared.trainer.limits()).max_context
    others = [
        {"model_name": base.name, "trainable": False, "sampleable": True}
        for base in shared.catalog.view().bases()
        if base.name != shared.settings.base
    ]
    return answer({"supported_models": [trained, *others]})


def words(metadata: dict[str, Any] | None) -> dict[str, str]:
    """The part of a client's metadata that is text. Raises InvalidRequest for a policy's name that isn't."""
    policy = (metadata or {}).get(POLICY)
    if not isinstance(policy, str | None):
        raise InvalidRequest(f"user_metadata.{POLICY} is {shown(str(policy))}: expected text", field="user_metadata")
    return {name: value for name, value in (metadata or {}).items() if isinstance(value, str)}
