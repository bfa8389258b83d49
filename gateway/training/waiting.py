"""A training service that has no journal yet: PostgreSQL is away, or another process has the service's name.

Its host goes on without it, clients are told to come again, and it takes over when the other one is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from wire.outcomes import JournalUnavailable

from .store import Store

_log = logging.getLogger(__name__)

_RETRY_S = 1.0
_END_S = 0.1


async def waited_for(open_journal: Callable[[], Store], socket: str, stop: asyncio.Event) -> Store | None:
    """The journal; None where ``stop`` is set before it can be had. Raises JournalUnavailable where it can't be."""
    waiting = None
    try:
        while not stop.is_set():
            try:
                return await asyncio.to_thread(open_journal)
            except JournalUnavailable as error:
                if error.retry_after_s is None:
                    raise
                if waiting is None:
                    _log.warning("waiting for the journal: %s", error.message)
                    waiting = await _listen(socket)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await stop.wait()
        return None
    finally:
        if waiting is not None:
            await waiting.cleanup()


async def _listen(socket: str) -> web.AppRunner:
    app = web.Application()
    app.router.add_get("/api/v1/healthz", _healthz)
    app.router.add_route("*", "/{rest:.*}", _not_yet)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_END_S)
    await runner.setup()
    await listen_on(runner, socket)
    return runner


async def listen_on(runner: web.AppRunner, socket: str) -> None:
    """Serve on the socket file, which an earlier life may have left: whoever has the journal has it too."""
    Path(socket).unlink(missing_ok=True)  # noqa: ASYNC240 - once, before anything is served
    await web.UnixSite(runner, socket).start()


async def _healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "waiting"})


async def _not_yet(request: web.Request) -> web.Response:
    error = "the training service waits for its journal"
    return web.json_response({"error": error, "detail": error, "category": "server"}, status=503)
