"""One small engine of any backend, with its driver, an arena as a sidecar keeps it, and adapters by seed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from backends.interface import EngineBackend, Installable
from backends.procfs import session_members
from backends.registry import make_backend
from tests.backends.support import PROMPT, Caller, EngineStage, SharedArena, tiny_settings
from tests.models import chat_prompt, make_adapter, make_tiny_base, reference_answer, text_of

BASE = "tiny-base"
SLOTS, MAX_RANK = 2, 8
# a busy machine takes its time
START_S = 500.0
# has answers tell how much of the prompt came from the prefix cache
CACHE_REPORT: Mapping[str, tuple[str, ...]] = {
    "vllm": ("--enable-prompt-tokens-details",),
    "sglang": ("--enable-cache-report",),
}


class Contract(EngineStage):
    """``kind`` is the backend's name. The engine computes in float32: answers are PEFT's, token for token."""

    def __init__(self, root: Path, kind: str) -> None:
        self.root, self.kind = root, kind
        self.base = make_tiny_base(root / "base")
        self.settings = tiny_settings(
            self.base, backend=kind, slots=SLOTS, max_rank=MAX_RANK, extra_args=CACHE_REPORT[kind]
        )
        self.backend: EngineBackend = self.make_backend()
        self.arena = SharedArena(f"contract-{kind}")

    def make_backend(self) -> EngineBackend:
        return make_backend(self.settings, run_dir=self.root / "run", log_dir=self.root / "log")

    def folder(self, seed: int, **about: Any) -> Path:
        folder = self.root / f"adapter-{seed}"
        return folder if folder.exists() else make_adapter(folder, self.base, seed=seed, **about)

    def reference(self, seed: int | None, prompt: str = "", max_tokens: int = 24) -> str:
        """What transformers and PEFT make of the prompt; None asks the base."""
        folder = None if seed is None else self.folder(seed)
        return reference_answer(self.base, folder, prompt or chat_prompt(self.base, PROMPT), max_tokens)

    def text(self, tokens: Sequence[int]) -> str:
        """What the tokenizer makes of token ids."""
        return text_of(self.base, tokens)

    def put(self, seed: int, *, tenant: str = "acme", **about: Any) -> Installable:
        """The adapter's bytes in the arena."""
        return self.arena.put(self.folder(seed, **about), self.base, tenant=tenant)

    async def install(self, seed: int, *, tenant: str = "acme", **about: Any) -> str:
        adapter = self.put(seed, tenant=tenant, **about)
        await self.backend.install(adapter, 60)
        return adapter.adapter

    def told(self) -> list[Path]:
        """What other users of the host, and readers of its logs, see of the engine."""
        members = session_members(self.backend.pid or 0)
        return [*(Path(f"/proc/{one.pid}/cmdline") for one in members), *(self.root / "log").iterdir()]

    async def check(self, caller: Caller) -> None:
        """The engine takes adapters, and they and its base answer as PEFT says."""
        await self.empty()
        adapters = [await self.install(seed) for seed in (1, 2)]
        asked = await asyncio.gather(*(caller.complete(model) for model in (BASE, *adapters)))
        assert asked == [(200, self.reference(seed)) for seed in (None, 1, 2)]

    def put_of_another_base(self, name: str, **config: Any) -> Installable:
        """An adapter of a base that is like ours but for what ``config`` says of it."""
        other = self.root / f"base-{name}"
        other.mkdir(exist_ok=True)
        told = json.loads((self.base / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(told | config))
        return self.arena.put(make_adapter(self.root / f"adapter-{name}", other), other)

    def put_not_finite(self, seed: int) -> Installable:
        """An adapter whose last element is no number."""
        whole = self.put(seed)
        data = bytearray(whole.view())
        np.frombuffer(data, "<f4", offset=len(data) - 4)[0] = np.nan
        return self.arena.put_bytes(bytes(data), blake3(data).hexdigest(), whole.rank)
