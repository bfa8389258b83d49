"""The engines that installs are measured on: how each is started for it, and what calls its load endpoint.

Both run with our additions in them. The stock way is the engine's own loader of a PEFT folder, called through its
endpoint in the same server: vLLM's plug-in hands such loads to it once a slot is free, and SGLang's has it write the
slot before it answers.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from backends.interface import EngineBackend, EngineSettings
from backends.sglang import command as sglang
from backends.sglang.client import SglangClient
from backends.sglang.cpu_standins import LABEL
from backends.sglang.terms import TARGETS
from backends.vllm import command as vllm
from backends.vllm.client import VllmClient

from .bases import CONTEXT, SLOTS, Base, slot_rank

_START_S = 600.0
_FLAGS = {
    "vllm": ("--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--no-enable-prefix-caching"),
    "sglang": ("--disable-radix-cache",),
}
_CUDA_FLAGS = {"vllm": ("--gpu-memory-utilization", "0.92"), "sglang": ()}


def device_of(engine: str, device: str) -> str:
    """``cpu`` or ``cuda``."""
    settings = EngineSettings(name="install", base="", fingerprint="", device=device)
    return sglang.device_of(settings) if engine == "sglang" else vllm.device_of(settings)


def engine_settings(base: Base, rank: int, folder: Path, engine: str = "vllm") -> EngineSettings:
    """An engine of made-up weights with SLOTS slots for adapters of ``rank``; ``folder`` holds its configuration."""
    flags = _FLAGS[engine] + (_CUDA_FLAGS[engine] if base.device == "cuda" else ())
    return EngineSettings(
        name="install", backend=engine, base=base.name, model_path=str(folder), fingerprint="0" * 64, slots=SLOTS,
        max_rank=slot_rank(rank), dtype="bfloat16", max_model_len=CONTEXT, max_num_seqs=SLOTS + 1, device=base.device,
        extra_args=flags, env={"VLLM_USE_FLASHINFER_SAMPLER": "0"}, start_timeout_s=_START_S,
    )  # fmt: skip


def client_of(backend: EngineBackend) -> VllmClient | SglangClient:
    """Calls the server's own endpoints."""
    host, port = backend.address()
    kind = SglangClient if backend.settings.backend == "sglang" else VllmClient
    return kind(host, port, backend.token())


def target_names(engine: str) -> tuple[str, ...]:
    """What an adapter's folder has to name as adapted; nothing where the engine takes any PEFT folder."""
    return tuple(TARGETS) if engine == "sglang" else ()


def stand_ins(engine: str, device: str) -> dict[str, Any]:
    """What was not real in a measurement."""
    if engine == "sglang":
        return {"weights": "drawn at random"} | ({"engine": LABEL} if device == "cpu" else {})
    return {"weights": "made up by the engine (load format dummy)"}


def version_of(engine: str) -> dict[str, str]:
    """What the report can't find in this environment: the version of an engine that has another."""
    if engine != "sglang":
        return {}
    asked = "from importlib.metadata import version as v; print(v('sglang'), v('torch'))"
    told = subprocess.run([sglang.interpreter(), "-c", asked], capture_output=True, text=True, check=True)
    version, torch = told.stdout.split()
    return {"version_sglang": version, "version_torch": torch}
