"""Looking through what there is: sessions, runs and checkpoints. All of a tenant's is its own."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from catalog.names import shown
from gateway.training.listings import RunListed
from gateway.training.paths import SAMPLER_WEIGHTS
from gateway.training.records import SavedRecord
from wire.events import Scope
from wire.outcomes import InvalidRequest

from .services import caller, own_run, own_session, services
from .sessions import answer

routes = web.RouteTableDef()

_MAX_LIMIT = 1000
_MAX_OFFSET = (1 << 31) - 1


@routes.get("/api/v1/sessions")
async def list_sessions(request: web.Request) -> web.Response:
    asker = caller(request, Scope.INVOKE)
    offset, limit = _bounds(request, 20)
    page = await services(request).listings.sessions(asker.reaches, offset, limit)
    return answer({"sessions": [session.session_id for session in page.items]})


@routes.get("/api/v1/sessions/{session_id}")
async def get_session(request: web.Request) -> web.Response:
    asker = caller(request, Scope.INVOKE)
    _check_query(request)
    session = own_session(request, asker, request.match_info["session_id"])
    runs, samplers = services(request).listings.of_session(session)
    return answer({"training_run_ids": runs, "sampler_ids": samplers, "user_metadata": session.metadata or None})


@routes.get("/api/v1/training_runs")
async def list_training_runs(request: web.Request) -> web.Response:
    asker = caller(request, Scope.INVOKE)
    offset, limit = _bounds(request, 20)
    page = await services(request).listings.runs(asker.reaches, offset, limit)
    runs = [_run_document(listed) for listed in page.items]
    return answer({"training_runs": runs, "cursor": _cursor(offset, limit, page.total)})


@routes.get("/api/v1/training_runs/{model_id}")
async def get_training_run(request: web.Request) -> web.Response:
    asker = caller(request, Scope.INVOKE)
    _check_query(request)
    run = own_run(request, asker, request.match_info["model_id"])
    return answer(_run_document(services(request).listings.run(run)))


@routes.get("/api/v1/training_runs/{model_id}/checkpoints")
async def list_checkpoints(request: web.Request) -> web.Response:
    """A run's, all of them."""
    asker = caller(request, Scope.INVOKE)
    run = own_run(request, asker, request.match_info["model_id"])
    saved = services(request).listings.saved_by(run)
    return answer({"checkpoints": [_checkpoint_document(each) for each in saved]})


@routes.get("/api/v1/checkpoints")
async def list_user_checkpoints(request: web.Request) -> web.Response:
    asker = caller(request, Scope.INVOKE)
    offset, limit = _bounds(request, 100)
    page = await services(request).listings.saved(asker.reaches, offset, limit)
    checkpoints = [_checkpoint_document(each) for each in page.items]
    return answer({"checkpoints": checkpoints, "cursor": _cursor(offset, limit, page.total)})


def _run_document(listed: RunListed) -> dict[str, Any]:
    """``policy`` in the metadata is what the run is called in the catalog."""
    run = listed.run
    return {
        "training_run_id": run.model_id,
        "base_model": run.base,
        "model_owner": run.tenant,
        "is_lora": True,
        "lora_rank": run.rank,
        # it could not be made
        "corrupted": bool(run.next_seq) and not run.targets,
        "last_request_time": _time(listed.asked_ms),
        "last_checkpoint": _checkpoint_document(listed.checkpoint) if listed.checkpoint else None,
        "last_sampler_checkpoint": _checkpoint_document(listed.sampler) if listed.sampler else None,
        "user_metadata": listed.metadata | {"policy": run.policy},
    }


def _checkpoint_document(saved: SavedRecord) -> dict[str, Any]:
    kind, name = saved.path.split("/")[-2:]
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": "sampler" if kind == SAMPLER_WEIGHTS else "training",
        "time": _time(saved.created_ms),
        "tinker_path": saved.path,
        "size_bytes": saved.size or None,
        "public": False,
        "expires_at": _time(saved.expires_ms) if saved.expires_ms else None,
    }


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _bounds(request: web.Request, limit: int) -> tuple[int, int]:
    """Offset and limit. Raises InvalidRequest."""
    _check_query(request)
    return _number(request, "offset", 0, 0, _MAX_OFFSET), _number(request, "limit", limit, 1, _MAX_LIMIT)


def _number(request: web.Request, name: str, default: int, least: int, most: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
        raise InvalidRequest(f"{name} is {shown(text)}: expected {least} to {most}", field=name)
    return int(text)


def _check_query(request: web.Request) -> None:
    """What is a tenant's is owned by it and accessible to it alone. Raises InvalidRequest."""
    scope = request.query.get("access_scope", "owned")
    if scope not in ("owned", "accessible"):
        raise InvalidRequest(f"access_scope {shown(scope)} is not owned or accessible", field="access_scope")
    if "project_id" in request.query:
        raise InvalidRequest("project_id: there are no projects here, only tenants", field="project_id")
