"""Which vLLM the plug-in may patch: it knows the seams by name and parameters, and checks them before touching any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backends.seams import complaint

# tried end to end: 0.32.0 on CPU, 0.22.1 on CUDA; any other is accepted where its seams look the same
TRIED = "0.32.0 and 0.22.1"

CORE_SEAMS = {
    "vllm.v1.engine.core:EngineCore.add_lora": ("self", "lora_request"),
    "vllm.v1.engine.core:EngineCore.remove_lora": ("self", "lora_id"),
    "vllm.v1.engine.core:EngineCore.add_request": ("self", "request", "request_wave"),
    "vllm.v1.engine.core:EngineCore.collective_rpc": ("self", "method", "timeout", "args", "kwargs"),
    "vllm.v1.engine.core:EngineCoreProc._process_input_queue": ("self",),
    "vllm.v1.engine.core:EngineCoreProc.has_work": ("self",),
    "vllm.v1.engine.core:EngineCoreProc._send_error_outputs_to_client": ("self", "req_ids", "client_index"),
}
SERVER_SEAMS = {
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels.unload_lora_adapter": ("self", "request"),
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels._check_unload_lora_adapter_request": (
        "self",
        "request",
    ),
    "vllm.entrypoints.serve.lora.api_router:attach_router": ("app",),
}
WORKER_SEAMS = {
    "vllm.lora.lora_model:LoRAModel.get_lora": ("self", "module_name"),
    "vllm.lora.utils:parse_fine_tuned_lora_name": ("name", "weights_mapper"),
    "vllm.lora.model_manager:LRUCacheLoRAModelManager.activate_adapter": ("self", "lora_id"),
    "vllm.lora.model_manager:LRUCacheLoRAModelManager.remove_adapter": ("self", "adapter_id"),
    "vllm.lora.layers:MergedQKVParallelLinearWithLoRA.set_lora": ("self", "index", "lora_a", "lora_b"),
    "vllm.lora.layers:FusedMoEWithLoRA.set_lora": ("self", "index", "lora_a", "lora_b"),
    "vllm.lora.layers:FusedMoE3DWithLoRA.set_lora": ("self", "index", "lora_a", "lora_b"),
}
# of an adapter manager: what an install reads of the model, and what it writes down
MANAGER_ATTRIBUTES = (
    "lora_config", "device", "model", "modules", "packed_modules", "lora_index_to_id", "_registered_adapters",
    "_active_adapters",
)  # fmt: skip
_OF_TOKENS = ("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor")
CPU_SEAMS = {
    f"{module}:{kernel}": (*_OF_TOKENS, *rest)
    for module in ("vllm.lora.ops.torch_ops.lora_ops", "vllm.lora.punica_wrapper.punica_cpu")
    for kernel, rest in (
        ("bgmv_shrink", ("scaling",)),
        ("bgmv_expand", ("add_inputs",)),
        ("bgmv_expand_slice", ("slice_offset", "slice_size", "add_inputs")),
    )
}


CPU_LOGITS_SEAMS: dict[str, tuple[str, ...]] = {
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_logits": (
        "self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "buffer", "kwargs",
    ),
}  # fmt: skip
CPU_MOE_SEAMS = {
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:select_unquantized_moe_backend": ("moe_config",),
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.process_weights_after_loading": (
        "self",
        "layer",
    ),
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply": (
        "self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts",
        "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta",
        "apply_router_weight_on_input",
    ),
}  # fmt: skip


class UnsupportedVllm(RuntimeError):
    """This vLLM lacks a seam that the plug-in needs: starting it would promise removals that do not happen."""


def rename_mapper(model: Any) -> Any:
    """What turns a checkpoint's names into the model's; None where they are the same. 0.22.1 has one mapper for all."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper


def expert_rank(module: Any) -> int:
    """Which part of a layer's experts a wrapped MoE module has; 0 where it has all. 0.22.1 tells of the base layer."""
    told = module if hasattr(module, "use_ep") else module.base_layer
    return int(told.ep_rank) if told.use_ep else 0


def shares_factors(module: Any) -> bool:
    """Whether a wrapped MoE module holds one factor for all its experts. 0.22.1 never does."""
    return bool(getattr(module, "enable_moe_shared_loras", False))


def check_attributes(thing: Any, names: Sequence[str]) -> None:
    """Raises UnsupportedVllm naming the first attribute that ``thing`` lacks."""
    for name in names:
        if not hasattr(thing, name):
            kind = thing if isinstance(thing, type) else type(thing)
            raise UnsupportedVllm(f"this vLLM's {kind.__name__} has no {name} (tried with {TRIED})")


def check(seams: dict[str, tuple[str, ...]]) -> None:
    """Raises UnsupportedVllm naming the first seam that is missing or has other parameters."""
    problem = complaint(seams)
    if problem:
        raise UnsupportedVllm(f"this vLLM is not one that we know (tried with {TRIED}): {problem}")
