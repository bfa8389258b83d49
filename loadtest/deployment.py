"""A whole mesh for a benchmark: the real processes under the real supervisor, in a folder of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import tomli_w
from safetensors.numpy import save_file

from ops.cli.client import ApiClient, policy_path
from ops.cli.session import Session
from packer.peft import pack_peft
from packer.shape import BaseShape

from .pack import write_adapter

BASE = "stub"
HIDDEN, INTERMEDIATE, LAYERS, RANK = 64, 128, 2, 4
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


class Mesh:
    """Registrar, sidecar and gateway of one node, real, with the ``engines`` and settings of the node that are told.

    ``training`` is the configuration's table of that name, where there is to be a training service.
    """

    def __init__(
        self,
        root: Path,
        engines: Sequence[Mapping[str, object]],
        node: Mapping[str, object],
        training: Mapping[str, object] | None = None,
    ) -> None:
        self.root = root
        self.state = root / "state"
        self.port = free_port()
        root.mkdir(parents=True, exist_ok=True)
        config = {
            "state_dir": str(self.state),
            "gateway": {"port": self.port, "anonymous": True},
            "node": {"name": "here", "engines": list(engines), **node},
            "training": dict(training or {}),
        }
        self._config = root / "roost.toml"
        self._config.write_text(tomli_w.dumps(config))

    def __enter__(self) -> Self:
        try:
            self.roost("up", "--config", str(self._config), "--detach")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.roost("down")

    def roost(self, *words: str) -> str:
        """Run the command; raises CalledProcessError with what it said."""
        command = [sys.executable, "-m", "ops.cli", "--state-dir", str(self.state), *words]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    def client(self) -> ApiClient:
        """The gateway's API, with the mesh's admin key."""
        return Session(state_dir=str(self.state)).client()

    def pid(self, process: str) -> int:
        return self.pids()[process]

    def pids(self) -> dict[str, int]:
        """The supervisor's processes by name."""
        status: dict[str, Any] = json.loads(self.roost("status", "--json"))
        return {one["name"]: int(one["identity"]["pid"]) for one in status["supervisor"]["processes"]}

    def node(self) -> dict[str, Any]:
        """The node as the gateway sees it."""
        found: dict[str, Any] = json.loads(self.roost("status", "--json"))["fleet"]["nodes"][0]
        return found


class StubbedMesh(Mesh):
    """The engine behind it is ``loadtest.stub_engine``, attached by address."""

    def __init__(self, root: Path, *, slots: int = 8, node: Mapping[str, object] | None = None) -> None:
        self.engine_port = free_port()
        self.base = root / "base"
        self.base.mkdir(parents=True)
        (self.base / "config.json").write_text(json.dumps(_CONFIG))
        save_file({"model.norm.weight": np.ones(HIDDEN, np.float32)}, self.base / "model.safetensors")
        engine = {
            "name": "stub-0",
            "base": BASE,
            "model_path": str(self.base),
            "attach": f"127.0.0.1:{self.engine_port}",
            # it answers everything alike
            "serve_base_unsafely": True,
            "slots": slots,
        }
        super().__init__(root, [engine], node or {})
        self._engine: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._engine = subprocess.Popen(
            [sys.executable, "-m", "loadtest.stub_engine", "--base", BASE, "--port", str(self.engine_port)]
        )
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._engine is not None:
            self._engine.send_signal(signal.SIGTERM)
            self._engine.wait()

    def publish(self, policy: str, seed: int) -> None:
        """A random adapter becomes the policy's next revision."""
        self.roost(
            "publish", policy, str(_make_adapter(self.root / policy.replace("/", "-"), seed)), "--create-over", BASE
        )


class EngineMesh(Mesh):
    """A mesh with one real vLLM over ``base``, a checkpoint's folder; ``engine`` overrides its settings."""

    ENGINE = "real-0"

    def __init__(self, root: Path, base: Path, engine: Mapping[str, object], node: Mapping[str, object]) -> None:
        told = {"name": self.ENGINE, "base": BASE, "model_path": str(base), "dtype": "float32"}
        super().__init__(root, [{**told, **engine}], node)
        self._base_config = (base / "config.json").read_bytes()

    def publish_random(self, policies: Sequence[str], seed: int) -> None:
        """Adapters of every module, each policy its own; made by two processes, since most of the time goes there."""
        client = self.client()
        with (
            tempfile.TemporaryDirectory(prefix="roost-loadtest-") as scratch,
            ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as makers,
        ):
            folders = [Path(scratch) / str(place) for place in range(len(policies))]
            seeds = range(seed, seed + len(policies))
            made = makers.map(_make_packed, folders, [self._base_config] * len(policies), seeds)
            for policy, (file, digest) in zip(policies, made, strict=True):
                client.upload(f"/roost/v1/artifacts/{digest}", file, lambda sent: None)
                body = {"digest": digest, "create_over": BASE, "provenance": {"source": "loadtest", "format": "peft"}}
                client.call("POST", policy_path(policy, "revisions"), body)
                file.unlink()


def _make_packed(folder: Path, base_config: bytes, seed: int) -> tuple[Path, str]:
    """A random adapter packed into a file, and its digest."""
    shape = BaseShape.from_config(base_config)
    write_adapter(folder / "raw", shape, seed)
    packed = folder / "revision.safetensors"
    with packed.open("wb") as out:
        facts = pack_peft(folder / "raw", shape, out)
    shutil.rmtree(folder / "raw")
    return packed, facts.digest


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_answering(port: int, seconds: float = 10.0) -> None:
    """Returns once something listens on the loopback port. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")


def _make_adapter(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for projection in ("q_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            tensors[f"{name}.lora_A.weight"] = chance.standard_normal((RANK, HIDDEN), np.float32)
            tensors[f"{name}.lora_B.weight"] = chance.standard_normal((HIDDEN, RANK), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM", "bias": "none"}))
    return folder
