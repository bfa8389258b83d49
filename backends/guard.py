"""Inside an engine's API server: every route but the liveness probe asks for the engine's token.

vLLM's own check covers ``/v1`` and a few prefixes, and leaves open routes that generate as well, such as
``/invocations``, others that change the engine's state, and metrics that name adapters.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

OPEN_PATHS = frozenset({"/health", "/ping"})

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """ASGI middleware: 401 for requests without ``Authorization: Bearer TOKEN``. An empty ``token`` lets nobody in."""

    def __init__(self, app: Application, *, token: str) -> None:
        self._app = app
        self._expected = b"Bearer " + token.encode() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._lets_in(scope):
            await _refuse(send)
        elif scope["type"] == "websocket" and not self._lets_in(scope):
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    def _lets_in(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return bool(self._expected) and len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def _refuse(send: Send) -> None:
    body = json.dumps(
        {"error": {"message": "this engine wants its token", "type": "Unauthorized", "code": 401}}
    ).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
