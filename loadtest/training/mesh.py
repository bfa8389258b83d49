"""A mesh that trains and serves one base on one host: a real vLLM, the training service, the Megatron trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loadtest.deployment import Mesh

from .bases import RANK, TrainedBase

NAME = "base"
_CONTEXT = 2048
# decode steps from CUDA graphs, without the minutes that compiling takes
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 64, 128, 192]}
# several on one GPU: vLLM wants a share of it to be free, though its cache has a size of its own
_CUDA_ENGINE: dict[str, Any] = {
    "dtype": "bfloat16", "kv_cache_bytes": 24 << 30, "max_num_seqs": 256,
    "extra_args": [
        "--compilation-config", json.dumps(_GRAPHS), "--specialize-active-lora", "--gpu-memory-utilization", "0.2",
    ],
}  # fmt: skip
_CPU_ENGINE: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 64}


def engine_options(base: TrainedBase) -> dict[str, Any]:
    """What an engine of ``base`` is started with, whoever starts it."""
    own = _CUDA_ENGINE if base.device == "cuda" else _CPU_ENGINE
    return {"base": NAME, "model_path": str(base.folder), "device": base.device, "max_model_len": _CONTEXT, **own}


def trainer_options(base: TrainedBase) -> dict[str, Any]:
    """What its trainer is started with: on a GPU that has room for activations, none of them is computed again."""
    if base.device == "cuda":
        return {
            "max_context": _CONTEXT, "micro_batch_tokens": 10240, "recompute": False,
            # where NVIDIA's MPS shares the GPU, the engine's short kernels go first
            "env": {"CUDA_MPS_CLIENT_PRIORITY": "1"},
        }  # fmt: skip
    return {"max_context": _CONTEXT, "micro_batch_tokens": 2048}


class TrainingMesh(Mesh):
    """Clients see the base as NAME."""

    def __init__(self, root: Path, base: TrainedBase, *, slots: int) -> None:
        engine = {"name": "real-0", "slots": slots, "max_rank": RANK, **engine_options(base)}
        trainer = {"model_path": str(base.folder), "device": base.device, **trainer_options(base)}
        super().__init__(
            root,
            [engine],
            {"arena_bytes": (4 if base.device == "cuda" else 1) << 30},
            {"base": NAME, "trainer": trainer},
        )
        self.base = base

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"
