"""Inside the API server: a removal removes, or answers 409; names that it has not answer 404; only who has the token
gets in at all.

SGLang by itself reloads a removed adapter at the next request that names it, from the path that it remembers, and
answers a model of any name from the base.
"""

from __future__ import annotations

import functools
import os
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers import tokenizer_control_mixin
from sglang.srt.managers.io_struct import LoRAUpdateOutput, UnloadLoRAAdapterReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.runtime_context import get_lora, get_parallel

from backends.guard import Guard
from backends.terms import ENGINE_ROUTE, REFUSED

from . import requests, versions
from .terms import BUSY, PLUGIN_VERSION, TARGETS, TOKEN_VARIABLE

_stock_serving = http_server.get_serving
_stock_load = TokenizerManager.load_lora_adapter
_stock_handle = OpenAIServingBase.handle_request


def patch() -> None:
    """Replace the handlers and add our route. Raises UnsupportedSglang."""
    versions.check(versions.SERVER_SEAMS)
    TokenizerManager.load_lora_adapter = load_lora_adapter
    TokenizerManager.load_lora_adapter_from_tensors = refuse_tensors
    TokenizerManager.unload_lora_adapter = unload_lora_adapter
    OpenAIServingBase.handle_request = handle_request
    tokenizer_control_mixin.LoRARef = reference
    requests.patch()
    token = os.environ.get(TOKEN_VARIABLE, "")
    http_server.app.add_middleware(Guard, token=token)
    http_server.get_serving = lambda: Keyed(_stock_serving(), token)
    http_server.app.add_api_route(ENGINE_ROUTE, describe_engine, methods=["GET"])


class Keyed:
    """The server's settings with the token as its key: by it SGLang's own calls of itself get in, its warm-up's too.

    Given as a setting, the token would stand in the log.
    """

    def __init__(self, stock: Any, api_key: str) -> None:
        self._stock = stock
        self.api_key = api_key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def reference(lora_name: str, **fields: Any) -> Any:
    """The id of an adapter is its name, which stands for its tenant and content: what the prefix cache has of it is
    right again after a reload. By itself SGLang draws an id for each load.
    """
    return LoRARef(lora_id=lora_name, lora_name=lora_name, **fields)


@functools.wraps(_stock_load)
async def load_lora_adapter(self: Any, obj: Any, _: Any = None) -> Any:
    """Load an adapter; its name stands for its content, so that one that is loaded is fine."""
    if obj.lora_name in self.lora_registry.get_all_adapters():
        return LoRAUpdateOutput(success=True)
    result = await _stock_load(self, obj, _)
    if not result.success:
        self.lora_ref_cache.pop(obj.lora_name, None)
        async with self.lora_update_lock:
            # some of several workers had it
            partly = self.pending_lora_unloads.pop(obj.lora_name, None)
            if partly is not None:
                await self.update_lora_adapter_communicator(_removal(obj.lora_name, partly))
    return result


async def refuse_tensors(self: Any, obj: Any, _: Any = None) -> Any:
    """A wrong checksum in such a call ends a stock server."""
    return LoRAUpdateOutput(success=False, error_message=f"{REFUSED}adapters come from the arena or a folder")


async def unload_lora_adapter(self: Any, obj: Any, _: Any = None) -> Any:
    """Remove the adapter from all workers and forget its path; 409 while an unfinished request names it."""
    self.auto_create_handle_loop()
    name = obj.lora_name
    registry = self.lora_registry
    async with self.lora_update_lock:
        async with registry._registry_lock.writer_lock:
            ref = registry._registry.get(name)
            if ref is None:
                return LoRAUpdateOutput(success=False, error_message=f"the adapter {name} does not exist here")
            counter = registry._counters[ref.lora_id]
            if counter.value():
                raise HTTPException(HTTPStatus.CONFLICT, f"{name}: {BUSY}")
            # from here on no request can name it; one that is past the look-up finds no counter, and fails
            del registry._registry[name], registry._counters[ref.lora_id]
            # in the same breath: a request that finds the path and no adapter would load it again
            path = self.lora_ref_cache.pop(name, None)
        result = tokenizer_control_mixin._merge_lora_update_results(
            await self.update_lora_adapter_communicator(_removal(name, ref.lora_id))
        )
        if result.success:
            return result
        # it is where it was, on some workers at least: a later removal finds it
        async with registry._registry_lock.writer_lock:
            registry._registry[name], registry._counters[ref.lora_id] = ref, counter
        self.lora_ref_cache[name] = path
        if BUSY in result.error_message:
            raise HTTPException(HTTPStatus.CONFLICT, f"{name}: {BUSY}")
        return result


def _removal(name: str, lora_id: str) -> Any:
    return UnloadLoRAAdapterReqInput(lora_name=name, lora_id=lora_id)


@functools.wraps(_stock_handle)
async def handle_request(self: Any, request: Any, raw_request: Any) -> Any:
    """404 for a model that is neither the base nor ``base:adapter`` of an adapter that is here."""
    base, adapters = self.tokenizer_manager.served_model_name, self.tokenizer_manager.lora_registry.get_all_adapters()
    model = getattr(request, "model", base)
    path = getattr(request, "lora_path", None)
    named = [name for name in (path if isinstance(path, list) else [path]) if name]
    if model.startswith(f"{base}:"):
        named.append(model.removeprefix(f"{base}:"))
    elif model != base:
        named.append(model)
    unknown = [name for name in named if name not in adapters or name == model]
    if unknown:
        return self.create_error_response(
            message=f"The model `{unknown[0]}` does not exist.", err_type="NotFoundError",
            status_code=HTTPStatus.NOT_FOUND,
        )  # fmt: skip
    return await _stock_handle(self, request, raw_request)


async def describe_engine() -> dict[str, Any]:
    """Limits, targets, and unfinished requests by adapter."""
    manager = http_server._global_state.tokenizer_manager
    registry, lora = manager.lora_registry, get_lora()
    return {
        "plugin": PLUGIN_VERSION,
        "slots": lora.max_loras_per_batch - 1,
        "max_rank": lora.max_lora_rank,
        "dtype": str(manager.model_config.dtype).removeprefix("torch."),
        "targets": sorted(TARGETS.values()),
        "adapters": {
            name: registry._counters[ref.lora_id].value() for name, ref in registry.get_all_adapters().items()
        },
        "arena": get_parallel().tp_size == 1,
    }
