"""vLLM's HTTP interface, as far as the driver needs it."""

from __future__ import annotations

import re

from backends.engine_client import EngineClient, message_of
from backends.interface import Removal
from wire.outcomes import EngineFailed

# what a stock server says, with a plain 500, of adapters that it will never load
_STOCK_REFUSAL = re.compile(
    r"max_lora_rank|target modules|The size of tensor|must match the|doesn't contain tensors|does not support"
    r"|not supported|vLLM only supports|Missing required configuration|deserializing header|must be a positive",
)


# what passes, though a server that runs without our plug-in may call it the caller's fault
_PASSING = re.compile(r"out of memory|not enough memory|can't allocate|cannot allocate|no space left", re.IGNORECASE)


class VllmClient(EngineClient):
    """One vLLM server's routes."""

    load_route = "/v1/load_lora_adapter"

    async def takes_adapters(self, timeout_s: float) -> bool:
        """Whether the server has its load route, which exists only where run-time updating is allowed."""
        status, _ = await self._call("GET", self.load_route, timeout_s)
        return status == 405

    def _has_it(self, message: str) -> bool:
        return "already been loaded" in message

    def _will_never(self, status: int, message: str) -> bool:
        refused = status == 400 or (status == 500 and _STOCK_REFUSAL.search(message) is not None)
        return refused and not _PASSING.search(message)

    async def unload(self, adapter: str, timeout_s: float) -> Removal:
        """Unload an adapter; REMOVED stands for the server's 200, whatever that is worth. Raises EngineFailed."""
        status, body = await self._call("POST", "/v1/unload_lora_adapter", timeout_s, {"lora_name": adapter})
        removal = {200: Removal.REMOVED, 404: Removal.ABSENT, 409: Removal.BUSY}.get(status)
        if removal is None:
            raise EngineFailed(f"the engine answered {status} to the removal of {adapter}: {message_of(body)}")
        return removal
