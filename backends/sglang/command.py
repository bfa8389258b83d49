"""How a SGLang server is started: arguments and environment from an engine's settings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from backends.dtypes import computed_in
from backends.gpu_share import check_share, gpu_is_there
from backends.interface import EngineSettings
from backends.process import Command
from backends.terms import ACTIVATION
from wire.outcomes import InvalidRequest

from .terms import CPU_VARIABLE, TARGETS, TOKEN_VARIABLE

# SGLang's pins are other than ours: it has an environment of its own, in which Roost is installed too
PYTHON_VARIABLE = "ROOST_SGLANG_PYTHON"
_BESIDE = Path(".cache/sglang/bin/python")

# it takes the base for one of the adapters of a batch
_BASE_SLOTS = 1
# what a load takes is refused beyond the slots, by us: the server's own eviction never begins
_ROOM = 2
# on CPU SGLang would take most of what memory is free
CPU_KV_CACHE_BYTES = 1 << 30
CPU_RUNNING = 16
# several schedulers number adapters each for itself, and SGLang refuses loads then
_SPLITTING_FLAGS = ("--dp-size", "--data-parallel-size", "--dp", "--tokenizer-worker-num", "--enable-dp-attention")
_KEY_FLAGS = ("--api-key", "--admin-api-key")


def interpreter() -> str:
    """The python that SGLang is installed for. Raises InvalidRequest where there is none."""
    path = Path(os.environ.get(PYTHON_VARIABLE) or Path(sys.prefix).parent / _BESIDE)
    if not path.is_file():
        raise InvalidRequest(
            f"no SGLang environment at {path}: `make sglang` makes one, or say {PYTHON_VARIABLE}=/path/to/python",
            field="backend",
        )
    return str(path)


def device_of(settings: EngineSettings) -> str:
    """``cpu`` or ``cuda``. Raises InvalidRequest for any other device."""
    if settings.device == "auto":
        return "cuda" if gpu_is_there() else "cpu"
    if settings.device not in {"cpu", "cuda"}:
        raise InvalidRequest(
            f"device {settings.device!r} of engine {settings.name} is not auto, cpu or cuda", field="device"
        )
    return settings.device


def command_for(settings: EngineSettings) -> Command:
    """The server's command line and what its environment adds. Raises InvalidRequest for settings it can't honour."""
    _check(settings)
    device = device_of(settings)
    if device == "cuda":
        check_share({**os.environ, **settings.env}, f"engine {settings.name}")
    dtype = dtype_of(settings)
    argv = [
        interpreter(), "-m", "backends.sglang.launch",
        "--model-path", str(Path(settings.model_path).resolve()),
        "--served-model-name", settings.base,
        "--dtype", dtype,
        "--enable-lora",
        "--max-loras-per-batch", str(settings.slots + _BASE_SLOTS),
        "--max-loaded-loras", str(_ROOM * (settings.slots + _BASE_SLOTS)),
        "--max-lora-rank", str(settings.max_rank),
        "--lora-target-modules", *TARGETS,
        "--lora-strict-loading",
    ]  # fmt: skip
    if settings.max_model_len:
        argv += ["--context-length", str(settings.max_model_len)]
    kv_cache_bytes = settings.kv_cache_bytes or (CPU_KV_CACHE_BYTES if device == "cpu" else 0)
    if kv_cache_bytes:
        argv += ["--max-total-tokens", str(tokens_in(kv_cache_bytes, settings, dtype))]
    if settings.max_num_seqs or device == "cpu":
        argv += ["--max-running-requests", str(settings.max_num_seqs or CPU_RUNNING)]
    if device == "cpu":
        argv += [
            "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
            "--lora-backend", "torch_native", "--disable-overlap-schedule", "--mem-fraction-static", "0.6",
            # it would keep a core busy with looking for requests
            "--sleep-on-idle",
        ]  # fmt: skip
    return Command(
        argv=(*argv, *settings.extra_args), env={**_environment(device), **settings.env}, token_in=TOKEN_VARIABLE
    )


def dtype_of(settings: EngineSettings) -> str:
    """What the engine computes in: SGLang is never left to take ``auto`` in its own way. It looks at no weights, and
    takes a base in float32 for float16, in which numbers overflow that bfloat16 holds. Raises InvalidRequest.
    """
    try:
        return computed_in(settings.dtype, Path(settings.model_path))
    except InvalidRequest as error:
        raise InvalidRequest(
            f"dtype {settings.dtype!r} of engine {settings.name}: {error.message}", field="dtype"
        ) from error


def tokens_in(kv_cache_bytes: int, settings: EngineSettings, dtype: str) -> int:
    """How many tokens' keys and values fit in ``dtype``, which is what SGLang is told. Raises InvalidRequest where that
    can't be known from the base's config.json.
    """
    path = Path(settings.model_path) / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Attention)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(
            f"kv_cache_bytes of engine {settings.name}: {path} does not say what a token takes ({error}); "
            "set it to 0 and give --max-total-tokens in extra_args",
            field="kv_cache_bytes",
        ) from error
    return max(1, kv_cache_bytes // config.bytes_per_token(dtype))


class _Attention(msgspec.Struct):
    """What of a config.json says how large a token's keys and values are."""

    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    num_key_value_heads: int = 0
    head_dim: int | None = None

    def bytes_per_token(self, dtype: str) -> int:
        head = self.head_dim or self.hidden_size // self.num_attention_heads
        return (
            2
            * self.num_hidden_layers
            * (self.num_key_value_heads or self.num_attention_heads)
            * head
            * (4 if dtype == "float32" else 2)
        )


def _check(settings: EngineSettings) -> None:
    if not Path(settings.model_path).is_dir():
        raise InvalidRequest(
            f"model_path {settings.model_path!r} of engine {settings.name} is not a folder", field="model_path"
        )
    if settings.slots < 1:
        raise InvalidRequest(f"slots of engine {settings.name} must be at least 1", field="slots")
    if settings.max_rank < 1:
        raise InvalidRequest(f"max_rank of engine {settings.name} must be at least 1", field="max_rank")
    for argument in settings.extra_args:
        flag = argument.partition("=")[0]
        if flag in _SPLITTING_FLAGS:
            raise InvalidRequest(
                f"engine {settings.name} can't be given {flag}: make it several engines", field="extra_args"
            )
        if flag in _KEY_FLAGS:
            raise InvalidRequest(
                f"engine {settings.name} can't be given {flag}, which every user of the host could read: "
                "it has a token of its own",
                field="extra_args",
            )
    if TOKEN_VARIABLE in settings.env:
        raise InvalidRequest(f"engine {settings.name} has a token of its own: take {TOKEN_VARIABLE} out", field="env")


def _environment(device: str) -> dict[str, str | None]:
    common: dict[str, str | None] = {
        ACTIVATION: "1",
        # its liveness probe would generate a token each time; a scheduler that dies takes the server along
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # log-probabilities are the model's own, whatever the temperature, as vLLM's are
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        # before it ends for a process that died, it would wait for dumps, for more than a minute, with all its clients
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        # longer than any of us keeps a connection: a call on one that is just being closed would end as uncertain
        "SGLANG_TIMEOUT_KEEP_ALIVE": "60",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "1",
        CPU_VARIABLE: None,
    }
    if device == "cuda":
        return common
    return common | {
        CPU_VARIABLE: "1",
        # a core is left to the mesh
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1)),
        # requests would wait for a compiler
        "TORCH_COMPILE_DISABLE": "1",
    }
