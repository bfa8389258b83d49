"""The control plane's application: its routes, and how errors are told."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

import msgspec
from aiohttp import web

from catalog.names import shown
from gateway.http import error_answer, error_body
from wire.outcomes import InvalidRequest, NotFound, RoostError, TooLarge

from . import (
    artifacts,
    bases,
    channels,
    health,
    keys,
    models,
    nodes,
    openapi,
    policies,
    position,
    retention,
    status,
    where,
)
from .requests import caller
from .services import SERVICES, Services
from .training import PATH as TRAINING_PATH
from .training import TrainingService

PARTS = (
    health, models, status, nodes, bases, policies, where, artifacts, channels, retention, keys, position, openapi,
)  # fmt: skip

_log = logging.getLogger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_control(
    shared: Services, *, data_paths: Iterable[str] = (), training: TrainingService | None = None
) -> web.Application:
    """The application of everything that is no data route. ``data_paths`` are known here to take POST alone.

    ``training`` gets the requests of the training API, which without it is not there.
    """
    app = web.Application(middlewares=[_tell_errors])
    app[SERVICES] = shared
    for part in PARTS:
        app.add_routes(part.routes)
    # before the data routes, which are described by those who made them
    app[openapi.ENCODED] = msgspec.json.encode(openapi.document(app))
    for path in data_paths:
        app.router.add_route("*", path, _only_post)
    if training is not None:
        app.router.add_route("*", TRAINING_PATH, training.pass_on)
    return app


async def _only_post(request: web.Request) -> web.StreamResponse:
    raise web.HTTPMethodNotAllowed(request.method, ["POST"])


@web.middleware
async def _tell_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        _check_encoding(request)
        return await handler(request)
    except RoostError as error:
        return error_response(error, operator=not error.public and _operates(request))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        answer = error_response(_named(error, request), status=error.status)
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except Exception:
        _log.exception("%s %s failed", request.method, request.path[:200])
        body = error_body("internal_error", "the gateway failed")
        return web.Response(status=500, content_type="application/json", body=body)


def _check_encoding(request: web.Request) -> None:
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise InvalidRequest(
            f"Content-Encoding {shown(encoding)} is not taken: send the body as it is", field="Content-Encoding"
        )


def _named(error: web.HTTPException, request: web.Request) -> RoostError:
    if error.status == 404:
        return NotFound(f"there is no {request.method} {request.path[:200]!r}")
    if error.status == 413:
        return TooLarge("the body is too large")
    return InvalidRequest(f"{request.method} is not served here: {error.reason}")


def _operates(request: web.Request) -> bool:
    try:
        return caller(request).operates
    except RoostError:
        return False


def error_response(error: RoostError, status: int | None = None, *, operator: bool = False) -> web.Response:
    """``error`` as the client sees it, or as who runs the fleet does."""
    code, headers, body = error_answer(error, operator=operator)
    text = {name.decode(): value.decode() for name, value in headers}
    return web.Response(status=status or code, headers=text, body=body)
