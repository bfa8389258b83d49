"""What becomes of a checkpoint: it is removed, or given a time. What can't be here is refused with its reason."""

from __future__ import annotations

from typing import NoReturn

from aiohttp import web

from catalog.names import shown
from gateway.auth import Caller
from gateway.training.paths import parse_saved
from gateway.training.records import SavedRecord
from wire.events import Scope
from wire.outcomes import InvalidRequest, NotFound

from . import bodies
from .services import caller, own_run, services
from .training import body_of, ttl_of

routes = web.RouteTableDef()

_CHECKPOINT = "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}"
_NO_PUBLIC = "there is no public here: a checkpoint is its tenant's alone"
_NO_ADDRESS = (
    "there are no download addresses here: what save_weights_for_sampler saves is a revision file in the store, which "
    "roost unpack turns into a PEFT folder"
)
_NO_PROJECTS = "there are no projects here, only tenants"
_REFUSED = (
    ("POST", f"{_CHECKPOINT}/publish", _NO_PUBLIC),
    ("DELETE", f"{_CHECKPOINT}/publish", _NO_PUBLIC),
    ("GET", f"{_CHECKPOINT}/archive", _NO_ADDRESS),
    ("GET", f"{_CHECKPOINT}/external_weights_urls", _NO_ADDRESS),
    ("POST", "/api/v1/save_weights_external", _NO_ADDRESS),
    ("POST", "/api/v1/copy_weights", _NO_PROJECTS),
    ("PUT", "/api/v1/sessions/{session_id}/project", _NO_PROJECTS),
    ("POST", "/api/v1/sessions/search", "sessions are listed here, and not searched"),
    ("POST", "/api/v1/sessions/{session_id}/trace_export", "sessions are not traced here"),
    ("GET", "/api/v1/sessions/{session_id}/trace_export", "sessions are not traced here"),
    ("GET", "/api/v1/audit", "there is no audit log here: roost policy history tells what happened to a policy"),
)


@routes.delete("/api/v1/training_runs/{model_id}/checkpoints/{checkpoint:[^/]+(?:/[^/]+)?}")
async def delete_checkpoint(request: web.Request) -> web.Response:
    """Asked again, the same."""
    asker = caller(request, Scope.PUBLISH)
    saved = _own_checkpoint(request, asker, request.match_info["checkpoint"], removed=True)
    await services(request).removal.remove(saved.path)
    return web.Response(status=204)


@routes.put(f"{_CHECKPOINT}/ttl")
async def set_checkpoint_ttl(request: web.Request) -> web.Response:
    """It expires so long after now, or never."""
    asker = caller(request, Scope.PUBLISH)
    given = bodies.decode(await body_of(request), bodies.CheckpointTtl)
    names = request.match_info
    saved = _own_checkpoint(request, asker, f"{names['kind']}/{names['name']}")
    await services(request).removal.keep_for(saved.path, ttl_of(given.ttl_seconds))
    return web.Response(status=204)


def _own_checkpoint(request: web.Request, asker: Caller, checkpoint: str, *, removed: bool = False) -> SavedRecord:
    """With ``removed`` also one that was. Raises InvalidRequest; NotFound, also for another tenant's."""
    run = own_run(request, asker, request.match_info["model_id"])
    try:
        path = str(parse_saved(f"tinker://{run.model_id}/{checkpoint}"))
    except InvalidRequest:
        raise InvalidRequest(
            f"checkpoint {shown(checkpoint)} is not weights/NAME or sampler_weights/NAME", field="checkpoint_id"
        ) from None
    saved = services(request).journal.saved(path, removed=removed)
    if saved is None:
        raise NotFound(f"there is no checkpoint {path}", field="checkpoint_id")
    return saved


def _refuse(method: str, path: str, why: str) -> None:
    @routes.route(method, path)
    async def refused(request: web.Request) -> NoReturn:
        caller(request, Scope.INVOKE)
        raise InvalidRequest(why)


for each in _REFUSED:
    _refuse(*each)
