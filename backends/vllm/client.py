"""vLLM's HTTP interface, as far as the driver needs it."""

from __future__ import annotations

import re

from backends.engine_client import ArenaOutOfReach, EngineClient, Unanswered, Unreachable, message_of
from backends.interface import InstallFailed, InstallRefused, InstallUncertain, Removal
from wire.outcomes import EngineFailed

from .terms import FAILED, OUT_OF_REACH, REFUSED

# what a stock server says, with a plain 500, of adapters that it will never load
_STOCK_REFUSAL = re.compile(
    r"max_lora_rank|target modules|The size of tensor|must match the|doesn't contain tensors|does not support"
    r"|not supported|vLLM only supports|Missing required configuration|deserializing header|must be a positive",
)


# what passes, though a server that runs without our plug-in may call it the caller's fault
_PASSING = re.compile(r"out of memory|not enough memory|can't allocate|cannot allocate|no space left", re.IGNORECASE)


class VllmClient(EngineClient):
    """One vLLM server's routes."""

    async def takes_adapters(self, timeout_s: float) -> bool:
        """Whether the server has its load route, which exists only where run-time updating is allowed."""
        status, _ = await self._call("GET", "/v1/load_lora_adapter", timeout_s)
        return status == 405

    async def load(self, adapter: str, path: str, timeout_s: float) -> None:
        """Load an adapter from a folder or an extent; one that is loaded already is fine: its name stands for its
        content.

        Raises InstallRefused, InstallFailed (ArenaOutOfReach too) or InstallUncertain.
        """
        call = {"lora_name": adapter, "lora_path": path}
        try:
            status, body = await self._call("POST", "/v1/load_lora_adapter", timeout_s, call)
        except Unreachable as error:
            raise InstallFailed(error.message) from error
        except Unanswered as error:
            raise InstallUncertain(error.message) from error
        # an answer may be told to clients: where an adapter lies is not for them
        message = message_of(body, hidden=path)
        if status == 200 or (status == 400 and "already been loaded" in message):
            return
        if REFUSED in message:
            raise InstallRefused(message.partition(REFUSED)[2])
        if OUT_OF_REACH in message:
            raise ArenaOutOfReach(message.partition(OUT_OF_REACH)[2])
        if FAILED in message:
            raise InstallFailed(message.partition(FAILED)[2])
        refused = status == 400 or (status == 500 and _STOCK_REFUSAL.search(message))
        if refused and not _PASSING.search(message):
            raise InstallRefused(message)
        raise InstallFailed(f"the engine answered {status}: {message}")

    async def unload(self, adapter: str, timeout_s: float) -> Removal:
        """Unload an adapter; REMOVED stands for the server's 200, whatever that is worth. Raises EngineFailed."""
        status, body = await self._call("POST", "/v1/unload_lora_adapter", timeout_s, {"lora_name": adapter})
        removal = {200: Removal.REMOVED, 404: Removal.ABSENT, 409: Removal.BUSY}.get(status)
        if removal is None:
            raise EngineFailed(f"the engine answered {status} to the removal of {adapter}: {message_of(body)}")
        return removal
