"""SGLang's HTTP interface, as far as the driver needs it."""

from __future__ import annotations

import re

import msgspec

from backends.engine_client import EngineClient
from backends.interface import Removal
from wire.outcomes import EngineFailed

# what a stock server says, with a 400, of adapters that it will never load
_STOCK_REFUSAL = re.compile(
    r"is incompatible with|doesn't support adapters|deserializing header|index out of range|is out of range"
    r"|invalid load key|KeyError|size of tensor|must match"
)
_LOADED = "already loaded"
_LOADED_TWICE = "already exists"
_ABSENT = "does not exist"


class _Told(msgspec.Struct):
    error_message: str | None = None


class _Model(msgspec.Struct):
    model_path: str = ""


class SglangClient(EngineClient):
    """One SGLang server's routes."""

    load_route = "/load_lora_adapter"

    async def takes_adapters(self, timeout_s: float) -> bool:
        """Whether adapters can be loaded at run time: a server without them refuses every removal for that reason."""
        _, body = await self._call("POST", "/unload_lora_adapter", timeout_s, {"lora_name": "roost-probe"})
        return "LoRA is not enabled" not in self._said(body)

    async def model_path(self, timeout_s: float) -> str:
        """Where the base's files are. Raises EngineFailed."""
        body = await self._expect_ok("/model_info", timeout_s)
        try:
            return msgspec.json.decode(body, type=_Model).model_path
        except msgspec.MsgspecError as error:
            raise EngineFailed(f"the engine's answer is not what was expected: {error}") from error

    def _has_it(self, message: str) -> bool:
        return _LOADED in message or _LOADED_TWICE in message

    def _will_never(self, status: int, message: str) -> bool:
        return status == 400 and _STOCK_REFUSAL.search(message) is not None

    async def unload(self, adapter: str, timeout_s: float) -> Removal:
        """Unload an adapter. A stock server waits for the requests that name it; ours answers BUSY. Raises
        EngineFailed.
        """
        status, body = await self._call("POST", "/unload_lora_adapter", timeout_s, {"lora_name": adapter})
        message = self._said(body)
        if status == 200:
            return Removal.REMOVED
        if status == 409:
            return Removal.BUSY
        if status == 400 and _ABSENT in message:
            return Removal.ABSENT
        raise EngineFailed(f"the engine answered {status} to the removal of {adapter}: {message}")

    def _said(self, body: bytes, *, hidden: str = "") -> str:
        try:
            told = msgspec.json.decode(body, type=_Told).error_message
        except msgspec.MsgspecError:
            told = None
        return super()._said(msgspec.json.encode({"message": told}) if told else body, hidden=hidden)
