"""The driver of a modelled engine, as the sidecar's engine keeper uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from backends.interface import (
    EngineLimits,
    EngineSettings,
    Health,
    Installable,
    InstallFailed,
    InstallUncertain,
    Removal,
)
from backends.vllm.driver import CALLS_AT_ONCE
from wire.outcomes import EngineFailed

from .constants import EngineConstants
from .engine import DIED, EngineModel

# an HTTP call on the host, there and back
CALL_S = 0.0005
MAX_RANK = 64


class NotThere(EngineFailed):
    """Nobody listens: nothing was asked."""


class EngineProcess:
    """An engine's process: outlives sidecars, dies, and is started again by whoever drives it. ``lives`` counts.

    ``stock`` loads each adapter as a stock server does, tensor by tensor inside the engine.
    """

    def __init__(self, settings: EngineSettings, constants: EngineConstants, *, stock: bool) -> None:
        self.settings = settings
        self.constants = constants
        self.stock = stock
        self.model: EngineModel | None = None
        self.ready_at = 0.0
        self.lives = 0
        self._loop = asyncio.get_running_loop()
        self._front_free_at = 0.0

    def start(self) -> None:
        """Nothing happens where it runs already."""
        if self.model is None or not self.model.alive:
            self.model = EngineModel(self.constants, self.settings.slots)
            self.ready_at = self._loop.time() + (self.constants.start_s if self.lives else 0.0)
            self.lives += 1

    def kill(self) -> None:
        if self.model is not None:
            self.model.die()

    @property
    def ready(self) -> bool:
        return self.model is not None and self.model.alive and self._loop.time() >= self.ready_at

    def passes_in(self, seconds: float) -> float:
        """When what comes now will have passed the server: after ``seconds``, and those who came before."""
        now = self._loop.time()
        begun = max(now, self._front_free_at)
        self._front_free_at = begun + self.constants.front_s
        return begun - now + max(seconds, self.constants.front_s)

    def install_seconds(self, size: int) -> float:
        """What an adapter takes of the engine's time."""
        constants = self.constants
        return constants.stock_install_s if self.stock else constants.install_s + size * constants.install_byte_s


class ModelBackend:
    """See ``backends.interface.EngineBackend``. Each sidecar's life has a driver of its own on the same process."""

    def __init__(self, process: EngineProcess) -> None:
        self.settings = process.settings
        self.detail = ""
        self._process = process
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        self._process.start()

    async def health(self) -> Health:
        model = self._process.model
        if model is None or not model.alive:
            self.detail = "its process ended"
            return Health.DEAD
        return Health.READY if self._process.ready else Health.STARTING

    async def limits(self) -> EngineLimits:
        return EngineLimits(
            slots=self.settings.slots,
            max_rank=MAX_RANK,
            targets=(),
            served_base=self.settings.base,
            dtype="float32",
            removes_for_real=True,
            calls_at_once=1 if self._process.stock else CALLS_AT_ONCE,
        )

    async def install(self, adapter: Installable, timeout_s: float) -> None:
        if not self._process.stock:
            await asyncio.sleep(self._process.passes_in(self._process.constants.prepare_s))

        def read() -> str:
            return bytes(adapter.view()).decode()

        seconds = self._process.install_seconds(adapter.length)
        try:
            failure = await self._ask(lambda model, end: model.install(adapter.adapter, seconds, read, end), timeout_s)
        except NotThere as error:
            raise InstallFailed(error.message) from None
        if failure == DIED:
            raise InstallUncertain(DIED)
        if isinstance(failure, str):
            raise InstallFailed(failure)

    async def remove(self, adapter: str, timeout_s: float) -> Removal:
        removal = await self._ask(lambda model, end: model.remove(adapter, end), timeout_s)
        if not isinstance(removal, Removal):
            raise EngineFailed(removal or "the engine did not say what it removed")
        return removal

    async def installed(self) -> frozenset[str]:
        await asyncio.sleep(CALL_S)
        return frozenset(self._model().installed)

    async def stop(self) -> None:
        self._process.kill()

    async def detach(self) -> None:
        """The process goes on."""

    def address(self) -> tuple[str, int]:
        return self.settings.host, self.settings.port

    @property
    def pid(self) -> int | None:
        return self._process.lives

    def token(self) -> str:
        return ""

    def _model(self) -> EngineModel:
        model = self._process.model
        if model is None or not model.alive:
            raise NotThere(f"engine {self.settings.name} is dead")
        return model

    async def _ask(
        self, ask: Callable[[EngineModel, Callable[[Removal | str | None], None]], None], timeout_s: float
    ) -> Removal | str | None:
        """What a call came to. The engine goes on with it where we stop waiting. Raises InstallUncertain."""
        ended: asyncio.Future[Removal | str | None] = self._loop.create_future()

        def end(result: Removal | str | None) -> None:
            if not ended.done():
                ended.set_result(result)

        await asyncio.sleep(CALL_S / 2)
        ask(self._model(), end)
        try:
            async with asyncio.timeout(timeout_s):
                result = await ended
        except TimeoutError:
            raise InstallUncertain(f"engine {self.settings.name} did not answer within {timeout_s:g} s") from None
        await asyncio.sleep(CALL_S / 2)
        return result
