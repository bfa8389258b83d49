"""Inside the engine core: adapters enter a free slot or not at all, and leave only when no request names them.

The core handles calls and requests from one queue, in order, so each of these functions sees every request that was
sent before it. The core keeps its own list of the adapters that answer, which vLLM's cache never outgrows: nothing is
ever evicted, hence nothing is ever read again from a path that may be gone, inside a step, at the price of the engine.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.engine.core import EngineCore

from . import versions
from .terms import FAILED, PLUGIN_VERSION, REFUSED

_stock_add_request = EngineCore.add_request
_stock_add_lora = EngineCore.add_lora
_stock_remove_lora = EngineCore.remove_lora

BUSY, REMOVED, ABSENT = "busy", "removed", "absent"


class AdapterRefused(ValueError):
    """The message, which is all that reaches the driver, says whether trying again may help."""


def patch() -> None:
    """Replace the core's adapter methods. Raises UnsupportedVllm."""
    versions.check(versions.CORE_SEAMS)
    EngineCore.add_lora = add_lora
    EngineCore.remove_lora = remove_lora
    EngineCore.add_request = add_request
    EngineCore.roost_remove_lora = remove_unless_busy
    EngineCore.roost_report = report


def adapters_of(core: EngineCore) -> dict[int, str]:
    """The adapters that answer: id -> name."""
    known: dict[int, str] = vars(core).setdefault("roost_adapters", {})
    return known


# vLLM decodes the argument by the annotation of the method it calls, so the stock signature must show through
@functools.wraps(_stock_add_lora)
def add_lora(self: EngineCore, lora_request: Any) -> bool:
    """Load an adapter into a free slot. Raises AdapterRefused; then neither the id nor a slot is taken."""
    known = adapters_of(self)
    slots = self.vllm_config.lora_config.max_loras if self.vllm_config.lora_config else 0
    if lora_request.load_inplace:
        raise AdapterRefused(f"{REFUSED}an adapter's name stands for its content: nothing is loaded in place")
    if lora_request.lora_int_id in known:
        if known[lora_request.lora_int_id] == lora_request.lora_name:
            return True
        raise AdapterRefused(f"{FAILED}id {lora_request.lora_int_id} is taken: do several API servers count alone?")
    if len(known) >= slots:
        raise AdapterRefused(f"{FAILED}no free slot: {len(known)} of {slots} are taken")
    problems = [answer for answer in self.collective_rpc("roost_add_lora", args=(lora_request,)) if answer]
    if problems:
        _stock_remove_lora(self, lora_request.lora_int_id)  # from the workers that did load it
        raise AdapterRefused(problems[0])
    known[lora_request.lora_int_id] = lora_request.lora_name
    return True


def remove_unless_busy(self: EngineCore, lora_id: int) -> str:
    """Free the adapter's slot unless an unfinished request, running, waiting or held, names it."""
    if _outstanding(self).get(lora_id):
        return BUSY
    removed = _stock_remove_lora(self, lora_id)
    adapters_of(self).pop(lora_id, None)
    return REMOVED if removed else ABSENT


@functools.wraps(_stock_remove_lora)
def remove_lora(self: EngineCore, lora_id: int) -> bool:
    return remove_unless_busy(self, lora_id) == REMOVED


@functools.wraps(_stock_add_request)
def add_request(self: EngineCore, request: Any, request_wave: int = 0) -> None:
    """Schedule a request, unless its adapter was removed after the API server had resolved its name."""
    lora = request.lora_request
    if lora is not None and adapters_of(self).get(lora.lora_int_id) != lora.lora_name:
        self._send_error_outputs_to_client([request.request_id], request.client_index)
        return
    _stock_add_request(self, request, request_wave)


def report(self: EngineCore) -> dict[str, Any]:
    """What the driver asks of an engine: its limits, and how many unfinished requests name each adapter."""
    config = self.vllm_config
    lora = config.lora_config
    outstanding = _outstanding(self)
    per_worker = self.collective_rpc("roost_targets") if lora is not None else []
    return {
        "plugin": PLUGIN_VERSION,
        "slots": lora.max_loras if lora is not None else 0,
        "max_rank": lora.max_lora_rank if lora is not None else 0,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "targets": sorted(set().union(*per_worker)),
        "adapters": {name: outstanding.get(lora_id, 0) for lora_id, name in adapters_of(self).items()},
    }


def _outstanding(core: EngineCore) -> dict[int, int]:
    counts: dict[int, int] = {}
    for request in core.scheduler.requests.values():
        if request.lora_request is not None:
            lora_id = request.lora_request.lora_int_id
            counts[lora_id] = counts.get(lora_id, 0) + 1
    return counts
