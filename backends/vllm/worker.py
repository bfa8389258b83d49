"""Inside a worker process: load one adapter whole, or leave no trace of it.

From an extent of the host's arena (``arena``), or as stock vLLM does from a PEFT folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.v1.worker.worker_base import WorkerBase

from backends.arena.segment import OutOfReach
from backends.extent_path import is_extent
from backends.faults import is_adapters_fault

from .terms import FAILED, OUT_OF_REACH, REFUSED

if TYPE_CHECKING:
    from .arena.install import Installer

logger = init_logger(__name__)

# modules as PEFT names them; what is wrapped under other names (MoE routers, heads) is reported as it is called
_SUFFIX = "_proj"


def patch() -> None:
    """Give workers the methods that the core calls.

    Each returns what went wrong, or "": an answer, since with several workers an exception of one would leave the
    answers of the others in their queues, to be taken for the answers to the next call.
    """
    WorkerBase.roost_prepare = prepare
    WorkerBase.roost_add_lora = add_lora
    WorkerBase.roost_finish_lora = finish_lora
    WorkerBase.roost_drop_lora = drop_lora
    WorkerBase.roost_targets = targets


def prepare(self: Any) -> str:
    """Make ready for installs through the arena. Returns why they can't be, or ""."""
    self.roost_installer = None
    try:
        # every process of the engine has this module, and only workers have use for this one
        from .arena.prepare import installer_for

        self.roost_installer = installer_for(self)
    except Exception as error:
        logger.exception("this worker can't read the arena")
        return _told(error)
    return ""


def add_lora(self: Any, lora_request: LoRARequest) -> str:
    """Load and activate an adapter; PENDING says that ``finish_lora`` will tell."""
    return _attempt(self, lora_request.lora_int_id, lambda: _add(self, lora_request))


def finish_lora(self: Any, lora_id: int, wait: bool) -> str:
    """Whether an adapter's bytes are all where they belong; PENDING while they are not, unless told to ``wait``."""
    return _attempt(self, lora_id, lambda: _installer_of(self).finish(lora_id, wait=wait))


def drop_lora(self: Any, lora_id: int) -> str:
    """Free the slot of an adapter that is not on all workers, or not whole."""
    try:
        if self.roost_installer is not None:
            self.roost_installer.abandon(lora_id)
    except Exception:  # the device's fault, which the answer that is given anyway has told
        logger.exception("adapter %d was dropped", lora_id)
    self.model_runner.lora_manager.remove_adapter(lora_id)
    return ""


def _attempt(worker: Any, lora_id: int, work: Callable[[], str]) -> str:
    try:
        return work()
    except Exception as error:  # whatever it was, the id and the slot must not stay taken
        logger.exception("adapter %d was not loaded", lora_id)
        drop_lora(worker, lora_id)
        kind = REFUSED if is_adapters_fault(error) else OUT_OF_REACH if isinstance(error, OutOfReach) else FAILED
        return f"{kind}{_told(error)}"


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__


def _add(worker: Any, lora_request: LoRARequest) -> str:
    if is_extent(lora_request.lora_path):
        return _installer_of(worker).begin(lora_request)
    manager = worker.model_runner.lora_manager
    adapters = manager._adapter_manager
    adapter = manager._load_adapter(lora_request)
    _check_layers(adapters, adapter)
    adapters.add_adapter(adapter)
    _check_shapes(adapters, adapter)
    adapters.activate_adapter(adapter.id)
    return ""


def _installer_of(worker: Any) -> Installer:
    installer: Installer | None = worker.roost_installer
    if installer is None:
        raise OutOfReach("this engine could not make ready for the arena; its log says why")
    return installer


def targets(self: Any) -> list[str]:
    """The modules that adapters may have on this model, sorted: our names, or where the base is none of ours vLLM's
    without their ``_proj``.

    Every driver that comes asks for them: a good moment to let a former sidecar's arena go.
    """
    if self.roost_installer is not None:
        self.roost_installer.drop_old_segments()
        return list(self.roost_installer.adaptable.targets())
    adapters = self.model_runner.lora_manager._adapter_manager
    packed = adapters.packed_modules_mapping
    wrapped = {name.rpartition(".")[2] for name in adapters.modules}
    names = {part for name in wrapped for part in packed.get(name, (name,))}
    return sorted(name.removesuffix(_SUFFIX) for name in names)


def _check_layers(adapters: Any, adapter: Any) -> None:
    """Raises ValueError for a layer that the model lacks: vLLM would ignore it and serve another function.

    Also for half a pair of matrices, on which it breaks in many ways.
    """
    if not adapter.loras:
        raise ValueError("the adapter has no tensors")
    halves = sorted(name for name, pair in adapter.loras.items() if pair.lora_a is None or pair.lora_b is None)
    if halves:
        raise ValueError(f"only one matrix of {halves[0]} is there")
    known = set(adapters.modules).union(*adapters.packed_modules.values())
    unknown = sorted(set(adapter.loras) - known)
    if unknown and not _is_split_over_layers(adapters):
        raise ValueError(f"the model has no {', '.join(unknown[:3])} ({len(unknown)} unknown layers)")


def _is_split_over_layers(adapters: Any) -> bool:
    from vllm.distributed import get_pp_group

    return bool(get_pp_group().world_size > 1)


def _check_shapes(adapters: Any, adapter: Any) -> None:
    """Raises ValueError where a matrix is smaller than its slot: vLLM would pad it with zeros and serve that.

    Only where modules are not split between workers; the revision's fit was checked against the base before.
    """
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    module: BaseLayerWithLoRA
    for name, module in adapters.modules.items():
        weights = adapters._get_lora_layer_weights(adapter, name)
        if weights is None or not isinstance(module, BaseLinearLayerWithLoRA) or module.tp_size > 1:
            continue
        for kind, given, axis in (("A", weights.lora_a, -1), ("B", weights.lora_b, -2)):
            slots = module.lora_a_stacked if kind == "A" else module.lora_b_stacked
            parts = given if isinstance(given, list) else [given]
            if len(parts) != len(slots):
                continue
            for part, slot in zip(parts, slots, strict=True):
                if part is not None and part.shape[axis] != slot.shape[axis]:
                    raise ValueError(f"{kind} of {name} has {part.shape[axis]} where the model has {slot.shape[axis]}")
