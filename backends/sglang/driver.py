"""The SGLang driver: one server, started by us or attached to.

A server that we start runs our additions (``launch``): what SGLang gets wrong by itself is put right inside it. A stock
server is asked in the ways that it answers rightly, and its driver says what it can't do. Either way it gets nothing
that it would compute otherwise than PEFT: adapters are written anew in the one form that it takes (``folder``).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from backends.engine_client import EngineFacts
from backends.engine_server import ASK_TIMEOUT_S, MIN_ASK_S, ServedEngine, base_at, to_the_end
from backends.interface import EngineLimits, Installable, InstallFailed, InstallRefused, Removal
from backends.process import Command
from packer.revision import RevisionFile
from wire.outcomes import ArtifactUnavailable, EngineFailed, InvalidRequest, Unfit

from .client import SglangClient
from .command import command_for
from .folder import check_fit, targets_of, write_for_sglang


class SglangBackend(ServedEngine[SglangClient]):
    """Drives one SGLang server."""

    says_so_while_it_starts = True

    def _command(self) -> Command:
        return command_for(self.settings)

    def _client_of(self, host: str, port: int, token: str) -> SglangClient:
        return SglangClient(host, port, token)

    def _fill(self, adapter: Installable, folder: Path, dtype: str) -> None:
        write_for_sglang(adapter.view(), folder, dtype=dtype, base=self._base)

    async def limits(self) -> EngineLimits:
        """What the server can do: its own word where we started it, the settings' elsewhere. Raises EngineFailed."""
        if self._limits is None:
            client = self._connected()
            bases = [card.id for card in await client.models(ASK_TIMEOUT_S) if card.parent is None]
            self._check_serves(bases)
            if not await client.takes_adapters(ASK_TIMEOUT_S):
                raise EngineFailed(f"the server at {self._where()} takes no adapters: start it with --enable-lora")
            model_path = self.settings.model_path or await client.model_path(ASK_TIMEOUT_S)
            self._base = await asyncio.to_thread(base_at, model_path)
            self._limits = self._limits_from(await client.facts(ASK_TIMEOUT_S))
        return self._limits

    def _limits_from(self, facts: EngineFacts | None) -> EngineLimits:
        settings = self.settings
        self._heed(facts)
        targets = tuple(sorted(targets_of(self._base)))
        if not targets:
            self._warn("SGLang takes no adapters of this base, whose experts' gate and up alternate")
        if facts is not None:
            return EngineLimits(
                slots=facts.slots, max_rank=facts.max_rank if targets else 0, targets=targets,
                served_base=settings.base, dtype=facts.dtype, removes_for_real=True,
            )  # fmt: skip
        self._warn("it runs without our additions: it evicts by itself, and a removal waits for requests")
        return EngineLimits(
            slots=settings.slots, max_rank=settings.max_rank if targets else 0, targets=targets,
            served_base=settings.base, dtype=settings.dtype, removes_for_real=False,
        )  # fmt: skip

    async def install(self, adapter: Installable, timeout_s: float) -> None:
        """Have the engine load the adapter. Raises InstallRefused, InstallFailed or InstallUncertain."""
        await self._limits_for_install()
        try:
            check_fit(RevisionFile(adapter.view()), self._base)
        except (InvalidRequest, Unfit) as error:
            raise InstallRefused(error.message, field=error.field) from error
        except ArtifactUnavailable as error:
            raise InstallFailed(error.message) from error
        await super().install(adapter, timeout_s)

    async def remove(self, adapter: str, timeout_s: float) -> Removal:
        """Unload an adapter and clear up its folder, without which no server loads it again. Raises EngineFailed where
        the engine did not tell.
        """
        deadline = time.monotonic() + timeout_s
        await self.limits()
        async with self._my_turn(deadline):
            removal = await self._connected().unload(adapter, max(deadline - time.monotonic(), MIN_ASK_S))
            if removal is not Removal.BUSY:
                await to_the_end(self._folders.discard, adapter)
        return removal
