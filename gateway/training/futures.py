"""Who waits for which result."""

from __future__ import annotations

import asyncio
import contextlib


class Futures:
    """Waits for results are woken, never told what came: the journal has that."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    async def wait(self, request_id: str, timeout_s: float) -> None:
        """Until ``request_id`` is resolved, for up to ``timeout_s``. It must not have been before the call."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request_id, set()).add(mine)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await mine
        finally:
            others = self._waiting.get(request_id)
            if others is not None:
                others.discard(mine)
                if not others:
                    del self._waiting[request_id]

    def resolved(self, request_id: str) -> None:
        for each in self._waiting.pop(request_id, ()):
            if not each.done():
                each.set_result(None)
