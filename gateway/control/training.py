"""The training API is another process's: its requests are passed on to it, and its answers back, as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from wire.outcomes import NoHealthyNode

PATH = "/api/v1/{rest:.*}"
# a request for a result may wait for as long as the service lets it
_TIMEOUT_S = 120.0
# how long a service that does not listen is waited for, and how often it is looked for
_PATIENCE_S = 2.0
_RETRY_S = 0.1
# what is between two neighbours only, and what either side writes for itself
_OWN = frozenset(
    {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "content-length", "date", "server"}
)


class TrainingService:
    """The service on the socket file ``socket``. Made and used on one event loop."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._http: aiohttp.ClientSession | None = None

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Its answer. Raises NoHealthyNode where it does not answer."""
        if self._http is None:
            connector = aiohttp.UnixConnector(self._socket, limit=0)
            self._http = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S), auto_decompress=False
            )
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return await self._answer(self._http, request)
            except aiohttp.ClientConnectorError as error:
                # nothing was sent. It may be starting anew, and SDKs come back at once for a result
                if time.monotonic() >= until:
                    raise NoHealthyNode("the training service does not answer", retry_after_s=1.0) from error
                await asyncio.sleep(_RETRY_S)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise NoHealthyNode("the training service does not answer", retry_after_s=1.0) from error

    async def _answer(self, http: aiohttp.ClientSession, request: web.Request) -> web.Response:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OWN}
        body = _body(request) if request.body_exists else None
        url = f"http://training{request.raw_path}"
        async with http.request(request.method, url, headers=headers, data=body, allow_redirects=False) as answer:
            told = web.Response(status=answer.status, body=await answer.read())
            for name, value in answer.headers.items():
                if name.lower() not in _OWN:
                    told.headers[name] = value
            return told

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


async def _body(request: web.Request) -> AsyncIterator[bytes]:
    async for chunk in request.content.iter_any():
        yield chunk
