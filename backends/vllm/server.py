"""Inside the API server: unloading removes from the engine, or answers 409; only who has the token gets in at all."""

from __future__ import annotations

import functools
import os
from asyncio import Lock
from http import HTTPStatus
from typing import Any
from weakref import WeakValueDictionary

from fastapi import FastAPI, Request
from vllm.entrypoints.openai.models import serving
from vllm.entrypoints.serve.lora import api_router

from backends.guard import Guard

from . import versions
from .terms import ENGINE_ROUTE, TOKEN_VARIABLE

_stock_init = serving.OpenAIServingModels.__init__
_stock_attach_router = api_router.attach_router


def patch() -> None:
    """Replace the unload handler and add our route. Raises UnsupportedVllm."""
    versions.check(versions.SERVER_SEAMS)
    serving.OpenAIServingModels.__init__ = initialise
    serving.OpenAIServingModels.unload_lora_adapter = unload_lora_adapter
    api_router.attach_router = attach_router


class NameLocks(WeakValueDictionary[str, Lock]):
    """A lock a name for as long as anybody uses it: vLLM keeps one for every name that was ever asked for."""

    def __getitem__(self, name: str) -> Lock:
        return self.setdefault(name, Lock())


@functools.wraps(_stock_init)
def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
    _stock_init(self, *args, **kwargs)
    self.lora_resolver_lock = NameLocks()


async def unload_lora_adapter(self: Any, request: Any) -> Any:
    """Remove the adapter from the engine, then forget its name; 409 while an unfinished request names it."""
    name = request.lora_name
    async with self.lora_resolver_lock[name]:
        error = await self._check_unload_lora_adapter_request(request)
        if error is not None:
            return error
        lora_id = self.lora_requests[name].lora_int_id
        outcome = await self.engine_client.engine_core.call_utility_async("roost_remove_lora", lora_id)
        if outcome == "busy":
            return serving.create_error_response(
                message=f"The lora adapter '{name}' is in use by unfinished requests.",
                err_type="ConflictError",
                status_code=HTTPStatus.CONFLICT,
            )
        # a request that resolved the name in the meantime is refused by the core: its id is gone
        del self.lora_requests[name]
        return f"Success: LoRA adapter '{name}' removed successfully."


def attach_router(app: FastAPI) -> None:
    _stock_attach_router(app)
    app.add_middleware(Guard, token=os.environ.get(TOKEN_VARIABLE, ""))
    app.add_api_route(ENGINE_ROUTE, describe_engine, methods=["GET"])


async def describe_engine(request: Request) -> dict[str, Any]:
    """The core's report: limits, targets, and unfinished requests by adapter."""
    report: dict[str, Any] = await request.app.state.engine_client.engine_core.call_utility_async("roost_report")
    return report
