"""Inside a scheduler: an adapter enters a free slot whole, or not at all, and leaves only when no request names it.

SGLang by itself keeps a loaded adapter on the host and writes its slot inside the first step that needs it, where a
tensor that does not fit ends the server. Here a load writes the slot, between two steps, and answers what became of it.
As many adapters as there are slots are let in, so that SGLang never evicts one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.mem_pool import EMPTY_SLOT
from sglang.srt.managers.scheduler import Scheduler

from backends.arena.segment import OutOfReach
from backends.extent_path import is_extent
from backends.faults import is_adapters_fault
from backends.terms import FAILED, OUT_OF_REACH, REFUSED
from wire.outcomes import InvalidRequest, Unfit

from . import versions
from .arena import ArenaReader
from .terms import BUSY

logger = logging.getLogger(__name__)

_stock_load = LoRAManager._load_lora_adapter
_stock_unload = LoRAManager._unload_lora_adapter
_stock_scheduler_unload = Scheduler.unload_lora_adapter


class Resident:
    """What SGLang asks of an adapter whose weights are in its slot: its rank and its scale."""

    def __init__(self, config: Any, scaling: float) -> None:
        self.config = config
        self.scaling = scaling


def patch() -> None:
    """Replace how adapters are loaded and removed. Raises UnsupportedSglang."""
    versions.check(versions.SCHEDULER_SEAMS)
    if Scheduler.unload_lora_adapter is unload_unless_busy:
        return
    LoRAManager._load_lora_adapter = load
    Scheduler.unload_lora_adapter = unload_unless_busy


@functools.wraps(_stock_load)
def load(self: Any, lora_ref: Any) -> Any:
    """Load an adapter into a free slot, or leave it in its own; a failure leaves no trace of it."""
    if lora_ref.lora_id in self.loras:
        # the caller gave up on a load that was still under way, and asked again
        return self.create_lora_update_result(True)
    if len(self.loras) >= self.max_loras_per_batch - 1:
        return self.create_lora_update_result(False, f"{FAILED}no free slot: all {len(self.loras)} are taken")
    try:
        if is_extent(lora_ref.lora_path):
            _install(self, lora_ref)
            return self.create_lora_update_result(True)
        result = _stock_load(self, lora_ref)
        if result.success:
            _write_slot(self, lora_ref.lora_id)
            return self.create_lora_update_result(True)
        problem = result.error_message
    except Exception as error:
        logger.exception("adapter %s was not loaded", lora_ref.lora_name)
        problem = f"{_kind(error)}{str(error) or type(error).__name__}"
    _drop(self, lora_ref)
    return self.create_lora_update_result(False, problem)


def _kind(error: Exception) -> str:
    """Whose fault it is, as the driver is told it."""
    if isinstance(error, OutOfReach):
        return OUT_OF_REACH
    if isinstance(error, AssertionError | KeyError | Unfit | InvalidRequest) or is_adapters_fault(error):
        return REFUSED
    return FAILED


def _install(manager: Any, lora_ref: Any) -> None:
    """From the arena into a free slot. Raises what ``ArenaReader.write`` does, and RuntimeError where there is none."""
    if not hasattr(manager, "roost_arena"):
        manager.roost_arena = ArenaReader(manager)
    pool = manager.memory_pool
    slot = next((slot for slot, uid in enumerate(pool.buffer_id_to_uid) if uid is EMPTY_SLOT), None)
    if slot is None:
        # no fault of the adapter's, as the ValueError of a search would be taken for
        raise RuntimeError("no slot of the memory pool is empty")
    written = manager.roost_arena.write(lora_ref.lora_path, slot)
    pool.uid_to_buffer_id[lora_ref.lora_id] = slot
    pool.buffer_id_to_uid[slot] = lora_ref.lora_id
    pool.eviction_policy.mark_used(lora_ref.lora_id)
    manager.loras[lora_ref.lora_id] = Resident(SimpleNamespace(r=written.rank), written.scaling)
    manager.lora_refs[lora_ref.lora_id] = lora_ref
    manager._notify_lora_slots_updated({slot})


def _write_slot(manager: Any, lora_id: str) -> None:
    manager.fetch_new_loras({lora_id})
    loaded = manager.loras[lora_id]
    # the slot is written once: the weights on the host have no further use
    manager.loras[lora_id] = Resident(loaded.config, loaded.scaling)


def _drop(manager: Any, lora_ref: Any) -> None:
    removed = _stock_unload(manager, lora_ref)
    manager.memory_pool.eviction_policy.remove(lora_ref.lora_id)
    if not removed.success:
        logger.warning("adapter %s was not cleared away: %s", lora_ref.lora_name, removed.error_message)


@functools.wraps(_stock_scheduler_unload)
def unload_unless_busy(self: Any, recv_req: Any) -> Any:
    """Free the adapter's slot unless an unfinished request, running or waiting, names it."""
    if recv_req.lora_id in set(_named(self)):
        manager = self.tp_worker.model_runner.lora_manager
        return manager.create_lora_update_result(False, BUSY)
    return _stock_scheduler_unload(self, recv_req)


def _named(scheduler: Any) -> Iterator[str | None]:
    """The adapters of all requests that are not through."""
    batches = (scheduler.running_batch, scheduler.last_batch)
    running = (req for batch in batches if batch is not None for req in batch.reqs)
    chunked = (scheduler.chunked_req,) if scheduler.chunked_req is not None else ()
    for req in (*scheduler.waiting_queue, *running, *chunked, *scheduler.grammar_manager.grammar_queue):
        if not req.finished():
            yield req.lora_id
