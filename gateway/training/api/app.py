"""The application: its routes, and errors in the form that SDKs understand."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from gateway.training.failures import status_of
from wire.outcomes import RoostError

from . import checkpoints, futures, listings, runs, sampling, sessions, training
from .services import SERVICES, Services

_log = logging.getLogger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(shared: Services) -> web.Application:
    app = web.Application(middlewares=[_tell_errors])
    app[SERVICES] = shared
    for part in (sessions, runs, training, sampling, futures, checkpoints, listings):
        app.add_routes(part.routes)
    return app


@web.middleware
async def _tell_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RoostError as error:
        message = error.message if error.public else "a part of the service is not available"
        return _told(status_of(error), message)
    except web.HTTPException as error:
        return _told(error.status, f"{request.method} {request.path[:200]} is not served here: {error.reason}")
    except Exception:
        _log.exception("%s %s failed", request.method, request.path[:200])
        return _told(500, "the training service failed")


def _told(status: int, message: str) -> web.Response:
    category = "user" if status < 500 else "server"
    body = msgspec.json.encode({"error": message, "detail": message, "category": category})
    return web.Response(status=status, body=body, content_type="application/json")
