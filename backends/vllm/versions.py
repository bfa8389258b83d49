"""Which vLLM the plug-in may patch: it knows the seams by name and parameters, and checks them before touching any."""

from __future__ import annotations

import importlib
import inspect
from operator import attrgetter

# tried end to end with this one (0.22.1 has the same seams); any other is accepted where its seams look the same
TRIED = "0.32.0"

CORE_SEAMS = {
    "vllm.v1.engine.core:EngineCore.add_lora": ("self", "lora_request"),
    "vllm.v1.engine.core:EngineCore.remove_lora": ("self", "lora_id"),
    "vllm.v1.engine.core:EngineCore.add_request": ("self", "request", "request_wave"),
    "vllm.v1.engine.core:EngineCore.collective_rpc": ("self", "method", "timeout", "args", "kwargs"),
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
_OF_TOKENS = ("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor")
CPU_SEAMS = {
    f"{module}:{kernel}": (*_OF_TOKENS, *rest)
    for module in ("vllm.lora.ops.torch_ops.lora_ops", "vllm.lora.punica_wrapper.punica_cpu")
    for kernel, rest in (
        ("bgmv_shrink", ("scaling",)),
        ("bgmv_expand", ("add_inputs",)),
        ("bgmv_expand_slice", ("slice_offset", "slice_size", "add_inputs")),
    )
} | {
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_logits": (
        "self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "buffer", "kwargs",
    ),
}  # fmt: skip


class UnsupportedVllm(RuntimeError):
    """This vLLM lacks a seam that the plug-in needs: starting it would promise removals that do not happen."""


def check(seams: dict[str, tuple[str, ...]]) -> None:
    """Raises UnsupportedVllm naming the first seam that is missing or has other parameters."""
    for seam, expected in seams.items():
        module, _, name = seam.partition(":")
        try:
            found = tuple(inspect.signature(attrgetter(name)(importlib.import_module(module))).parameters)
        except (ImportError, AttributeError) as error:
            raise UnsupportedVllm(f"this vLLM has no {seam} (tried with {TRIED}): {error}") from error
        if found != expected:
            raise UnsupportedVllm(f"{seam} takes {found}, not {expected} (tried with {TRIED})")
