"""Which SGLang our additions may change: they know the seams by name and parameters, and check them before any."""

from __future__ import annotations

from collections.abc import Mapping

from backends.seams import complaint

TRIED = "0.5.23"

SERVER_SEAMS: Mapping[str, tuple[str, ...]] = {
    "sglang.srt.entrypoints.http_server:get_serving": (),
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.load_lora_adapter": ("self", "obj", "_"),
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.load_lora_adapter_from_tensors": ("self", "obj", "_"),
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.unload_lora_adapter": ("self", "obj", "_"),
    "sglang.srt.lora.lora_registry:LoRARef": ("lora_id", "lora_name", "lora_path", "pinned"),
    "sglang.srt.managers.tokenizer_control_mixin:_merge_lora_update_results": ("results",),
    "sglang.srt.entrypoints.openai.serving_base:OpenAIServingBase.handle_request": ("self", "request", "raw_request"),
}
SCHEDULER_SEAMS = {
    "sglang.srt.managers.scheduler:Scheduler.unload_lora_adapter": ("self", "recv_req"),
    "sglang.srt.lora.lora_manager:LoRAManager._load_lora_adapter": ("self", "lora_ref"),
    "sglang.srt.lora.lora_manager:LoRAManager._unload_lora_adapter": ("self", "lora_ref"),
    "sglang.srt.lora.lora_manager:LoRAManager.create_lora_update_result": ("self", "success", "error_message"),
    "sglang.srt.lora.lora_manager:LoRAManager.fetch_new_loras": ("self", "new_loras", "running_loras"),
}
REQUEST_SEAMS = {
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.init_running_status": ("self",),
    "sglang.srt.managers.tokenizer_manager:TokenizerManager._validate_one_request": ("self", "obj", "input_ids"),
    "sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat._handle_last_assistant_message": (
        "self",
        "messages",
        "request",
    ),
}
SEED_SEAMS = {
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.from_schedule_batch": ("batch", "vocab_size"),
    "sglang.srt.layers.sampler:top_k_top_p_min_p_sampling_from_probs_torch": (
        "probs", "top_ks", "top_ps", "min_ps", "need_min_p_sampling", "sampling_seed", "positions",
        "return_filtered_probs", "max_top_k",
    ),
}  # fmt: skip
CPU_SEAMS = {
    "sglang.srt.lora.layers:FusedMoEWithLoRA._forward_with_lora": (
        "self", "hidden_states", "topk_output", "lora_info", "kwargs",
    ),
}  # fmt: skip


class UnsupportedSglang(RuntimeError):
    """This SGLang lacks a seam that we need: starting it would promise removals that do not happen."""


def check(seams: Mapping[str, tuple[str, ...]]) -> None:
    """Raises UnsupportedSglang naming the first seam that is missing or has other parameters."""
    problem = complaint(seams)
    if problem:
        raise UnsupportedSglang(f"this SGLang is not one that we know (tried with {TRIED}): {problem}")
