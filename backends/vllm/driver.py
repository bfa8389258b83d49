"""The vLLM driver: one server, started by us or attached to.

With our plug-in in the server, a load names the adapter's extent of the arena, which the engine has mapped, and a
removal frees the slot or answers BUSY. A stock server gets a PEFT folder, and only forgets the name: the driver says
so. Either way the server must be of this host: the load call carries a path.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from backends.engine_client import EngineFacts
from backends.engine_server import ASK_TIMEOUT_S, MIN_ASK_S, ServedEngine, base_at, to_the_end
from backends.interface import EngineLimits, Installable, Removal
from backends.process import Command
from packer.unpack import write_engine_peft
from wire.outcomes import EngineFailed

from .client import VllmClient
from .command import command_for, device_of
from .terms import PACES_LOADS

# of an engine that paces loads itself: enough for its long steps, few enough to leave the order of others open
CALLS_AT_ONCE = 16
# what a stock server's dense models take; it does not say
DENSE_TARGETS = ("down", "gate", "k", "o", "q", "up", "v")


class VllmBackend(ServedEngine[VllmClient]):
    """Drives one vLLM server."""

    def _command(self) -> Command:
        return command_for(self.settings)

    def _client_of(self, host: str, port: int, token: str) -> VllmClient:
        return VllmClient(host, port, token)

    def _fill(self, adapter: Installable, folder: Path, dtype: str) -> None:
        write_engine_peft(adapter.view(), folder, dtype=dtype, base=self._base)

    async def limits(self) -> EngineLimits:
        """What the server can do: its own word where our plug-in runs, the settings' elsewhere. Raises EngineFailed."""
        if self._limits is None:
            client = self._connected()
            bases = {card.id: card.root for card in await client.models(ASK_TIMEOUT_S) if card.parent is None}
            self._check_serves(bases)
            if not await client.takes_adapters(ASK_TIMEOUT_S):
                raise EngineFailed(
                    f"the server at {self._where()} takes no adapters at run time: "
                    "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                )
            self._base = await asyncio.to_thread(base_at, self.settings.model_path or bases[self.settings.base] or "")
            self._limits = self._limits_from(await client.facts(ASK_TIMEOUT_S))
        return self._limits

    def _limits_from(self, facts: EngineFacts | None) -> EngineLimits:
        settings = self.settings
        self._heed(facts)
        if facts is not None:
            return EngineLimits(
                slots=facts.slots, max_rank=facts.max_rank, targets=facts.targets, served_base=settings.base,
                dtype=facts.dtype, removes_for_real=True,
                calls_at_once=CALLS_AT_ONCE if self._takes_extents and facts.plugin >= PACES_LOADS else 1,
            )  # fmt: skip
        if self._process is not None:
            self._warn("it runs without our plug-in: is the project installed there?")
        # backends/vllm/cpu_kernels.py says why
        mixes_up = device_of(settings) == "cpu"
        if mixes_up:
            self._warn(
                "it is a CPU server without our plug-in: a request of the base that runs beside adapters' may get one "
                "of them, so requests of the base are "
                + ("wrong at times (serve_base_unsafely)" if settings.serve_base_unsafely else "not sent there")
            )
        return EngineLimits(
            slots=settings.slots, max_rank=settings.max_rank, targets=DENSE_TARGETS, served_base=settings.base,
            dtype=settings.dtype, removes_for_real=False, serves_base=settings.serve_base_unsafely or not mixes_up,
        )  # fmt: skip

    async def remove(self, adapter: str, timeout_s: float) -> Removal:
        """Unload an adapter and clear up its folder. Raises EngineFailed where the engine did not tell."""
        deadline = time.monotonic() + timeout_s
        limits = await self.limits()
        async with self._one_of(limits.calls_at_once, deadline):
            removal = await self._connected().unload(adapter, max(deadline - time.monotonic(), MIN_ASK_S))
            if removal is Removal.REMOVED and not limits.removes_for_real:
                await to_the_end(self._folders.forget, adapter)
                return Removal.FORGOTTEN
            if limits.removes_for_real and removal is not Removal.BUSY:
                await to_the_end(self._folders.discard, adapter)
        return removal
