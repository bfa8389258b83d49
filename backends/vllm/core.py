"""Inside the engine core: adapters enter a free slot or not at all, and leave only when no request names them.

The core handles calls and requests from one queue, in order, so each of these functions sees every request that was
sent before it. The core keeps its own list of the adapters that answer, which vLLM's cache never outgrows: nothing is
ever evicted, hence nothing is ever read again from a path that may be gone, inside a step, at the price of the engine.

While requests run, loads wait for each other's steps: as many begin between two of them as ``pace`` allows, oldest
first. Where an adapter's bytes take a while (a transfer to a device), steps go on. Either way the call is answered by a
Future, which the core's loop completes between two steps.
"""

from __future__ import annotations

import functools
from concurrent.futures import Future
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from . import versions
from .pace import Pace
from .terms import FAILED, PENDING, PLUGIN_VERSION, REFUSED

logger = init_logger(__name__)

_stock_add_request = EngineCore.add_request
_stock_add_lora = EngineCore.add_lora
_stock_remove_lora = EngineCore.remove_lora
_stock_process_input_queue = EngineCoreProc._process_input_queue

BUSY, REMOVED, ABSENT = "busy", "removed", "absent"


class AdapterRefused(ValueError):
    """The message, which is all that reaches the driver, says whether trying again may help."""


class Load:
    """An adapter that was asked for and nobody is told of yet; ``begun``: its bytes are on their way."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.begun = False
        self.answer: Future[bool] = Future()


def patch() -> None:
    """Replace the core's adapter methods. Raises UnsupportedVllm."""
    versions.check(versions.CORE_SEAMS)
    EngineCore.add_lora = add_lora
    EngineCore.remove_lora = remove_lora
    EngineCore.add_request = add_request
    EngineCore.roost_remove_lora = remove_unless_busy
    EngineCore.roost_report = report
    EngineCoreProc._process_input_queue = process_input_queue


def reads_the_arena(core: EngineCore) -> bool:
    """Whether all workers can install from the arena. The first call has them make ready."""
    known: bool | None = vars(core).get("roost_arena")
    if known is not None:
        return known
    # vLLM loads plug-ins while it makes the core: its constructor is past being replaced
    problems = ["adapters are not enabled"]
    if core.vllm_config.lora_config is not None:
        problems = [answer for answer in core.collective_rpc("roost_prepare") if answer]
    if problems:
        logger.warning("no installs through the arena: %s", problems[0])
    core.roost_arena = not problems
    return not problems


def adapters_of(core: EngineCore) -> dict[int, str]:
    """The adapters that answer: id -> name."""
    known: dict[int, str] = vars(core).setdefault("roost_adapters", {})
    return known


def loads_of(core: EngineCore) -> dict[int, Load]:
    """The loads that wait or are under way, by id, the oldest first."""
    loads: dict[int, Load] = vars(core).setdefault("roost_loads", {})
    return loads


def pace_of(core: EngineCore) -> Pace:
    pace: Pace = vars(core).setdefault("roost_pace", Pace())
    return pace


# vLLM decodes the argument by the annotation of the method it calls, so the stock signature must show through
@functools.wraps(_stock_add_lora)
def add_lora(self: EngineCore, lora_request: Any) -> bool | Future[bool]:
    """Load an adapter into a free slot. Raises AdapterRefused, or its Future does; then neither the id nor a slot is
    taken.
    """
    lora_id, name = lora_request.lora_int_id, lora_request.lora_name
    known, loads = adapters_of(self), loads_of(self)
    slots = self.vllm_config.lora_config.max_loras if self.vllm_config.lora_config else 0
    if lora_request.load_inplace:
        raise AdapterRefused(f"{REFUSED}an adapter's name stands for its content: nothing is loaded in place")
    if known.get(lora_id) == name:
        return True
    if lora_id in known or lora_id in loads:
        raise AdapterRefused(f"{FAILED}id {lora_id} is taken: do several API servers count alone?")
    if len(known) + len(loads) >= slots:
        raise AdapterRefused(f"{FAILED}no free slot: {len(known) + len(loads)} of {slots} are taken")
    load = loads[lora_id] = Load(lora_request)
    begin_loads(self)
    if not _has_work(self):
        finish_loads(self)
    # whoever calls in this process takes a Future for success
    return load.answer.result() if load.answer.done() else load.answer


def begin_loads(core: EngineCore) -> None:
    """Begin loads that wait: all of them, or as many as may be before the next step."""
    waiting = [load for load in loads_of(core).values() if not load.begun]
    if waiting:
        reads_the_arena(core)
    pace = pace_of(core)
    for load in waiting:
        if _has_work(core) and not pace.allows():
            return
        load.begun = True
        with pace.counted():
            _go_on(core, load.request.lora_int_id, "roost_add_lora", load.request)


def finish_loads(core: EngineCore) -> None:
    """Answer the loads that are through; all that have begun, after a wait, where the core has nothing else to do."""
    for lora_id, load in list(loads_of(core).items()):
        if load.begun:
            _go_on(core, lora_id, "roost_finish_lora", lora_id, not _has_work(core))


def _go_on(core: EngineCore, lora_id: int, method: str, *arguments: Any) -> None:
    """Have all workers do the next part of a load, and answer it if that was the last."""
    loads = loads_of(core)
    load = loads[lora_id]
    try:
        if not _settled(core, lora_id, core.collective_rpc(method, args=arguments)):
            return
    except Exception as error:  # refused, or the workers can't be asked any more: that shows in the next step
        del loads[lora_id]
        load.answer.set_exception(error)
    else:
        del loads[lora_id]
        adapters_of(core)[lora_id] = load.request.lora_name
        load.answer.set_result(True)


def _settled(core: EngineCore, lora_id: int, answers: list[str]) -> bool:
    """Whether all workers have the adapter. Raises AdapterRefused where one can't, once none has."""
    problems = [answer for answer in answers if answer and answer != PENDING]
    if problems:
        core.collective_rpc("roost_drop_lora", args=(lora_id,))
        raise AdapterRefused(problems[0])
    return not any(answers)


def _has_work(core: EngineCore) -> bool:
    """Whether the core's loop makes another step by itself; one without a loop never does."""
    return isinstance(core, EngineCoreProc) and bool(core.has_work())


@functools.wraps(_stock_process_input_queue)
def process_input_queue(self: EngineCoreProc) -> None:
    """Runs before the first step and between any two; it waits for calls where there is no request, so loads are
    answered before.
    """
    reads_the_arena(self)
    pace = pace_of(self)
    pace.step_ended()
    finish_loads(self)
    begin_loads(self)
    if not _has_work(self):
        finish_loads(self)
    _stock_process_input_queue(self)
    pace.step_begins()


def remove_unless_busy(self: EngineCore, lora_id: int) -> str:
    """Free the adapter's slot unless an unfinished request, running, waiting or held, names it."""
    if _outstanding(self).get(lora_id) or lora_id in loads_of(self):
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
    arena = reads_the_arena(self)
    per_worker = self.collective_rpc("roost_targets") if lora is not None else []
    return {
        "plugin": PLUGIN_VERSION,
        "slots": lora.max_loras if lora is not None else 0,
        "max_rank": lora.max_lora_rank if lora is not None else 0,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "targets": sorted(set().union(*per_worker)),
        "adapters": {name: outstanding.get(lora_id, 0) for lora_id, name in adapters_of(self).items()},
        "arena": arena,
    }


def _outstanding(core: EngineCore) -> dict[int, int]:
    counts: dict[int, int] = {}
    for request in core.scheduler.requests.values():
        if request.lora_request is not None:
            lora_id = request.lora_request.lora_int_id
            counts[lora_id] = counts.get(lora_id, 0) + 1
    return counts
