"""A server of an engine on this host, started by us or attached to, whatever engine it is: its life and its folders.

Drivers derive from it. The server must be of this host: a load carries a path.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

from catalog.names import check_part
from packer.shape import BaseShape
from wire.outcomes import ArtifactUnavailable, EngineFailed, InvalidRequest, StorageFull, Unfit

from .engine_client import ArenaOutOfReach, EngineClient, EngineFacts, Unanswered, Unreachable
from .extent_path import extent_of
from .folders import AdapterFolders
from .interface import (
    EngineLimits,
    EngineSettings,
    Health,
    Installable,
    InstallFailed,
    InstallRefused,
    InstallUncertain,
)
from .process import Command, EngineProcess
from .pulse import Pulse

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Client = TypeVar("Client", bound=EngineClient)

HEALTH_TIMEOUT_S = 2.0
ASK_TIMEOUT_S = 10.0
# the HTTP client takes zero for "no bound"
MIN_ASK_S = 0.001
# a server that was well and says nothing for this long is taken for dead, even where its process lives
SILENCE_S = 30.0
# the same for one that is at work meanwhile
BUSY_SILENCE_S = 300.0
STOP_GRACE_S = 10.0


class ServedEngine(ABC, Generic[Client]):
    """Drives one server; see ``backends.interface.EngineBackend`` for what each call promises.

    ``run_dir`` holds the engine's record and adapter folders, ``log_dir`` its log. Raises InvalidRequest for settings
    that can't be honoured.
    """

    # whether a server that is not well may be one that is not well yet
    says_so_while_it_starts = False

    def __init__(self, settings: EngineSettings, *, run_dir: Path, log_dir: Path) -> None:
        self.settings = settings
        check_part(settings.name, "engine")
        self._folders = AdapterFolders(run_dir / "adapters" / settings.name)
        self._process = None if settings.attach else EngineProcess(settings.name, run_dir=run_dir, log_dir=log_dir)
        self._address = _parse_address(settings.attach) if settings.attach else (settings.host, settings.port)
        self._token = _key_of(settings) if settings.attach else ""
        self._client: Client | None = None
        # where the engine would run loads that wait together without a step in between, it gets one at a time; and
        # folders are one load's at a time everywhere
        self._turn = asyncio.Lock()
        self._limits: EngineLimits | None = None
        # whether loads name extents of the arena
        self._takes_extents = False
        # what operators should know of it while it is well
        self._remark = ""
        # what the portable path writes for: None where its config.json is not at hand
        self._base: BaseShape | None = None
        self._started_at = 0.0
        self._answered_at: float | None = None
        self._pulse: Pulse | None = None
        self._dead = False
        self.detail = ""

    @abstractmethod
    def _command(self) -> Command:
        """How the server is started. Raises InvalidRequest for settings that it can't honour."""

    @abstractmethod
    def _client_of(self, host: str, port: int, token: str) -> Client:
        """A client of the server at that address."""

    @abstractmethod
    async def limits(self) -> EngineLimits:
        """Known once the engine is READY. Raises EngineFailed."""

    @abstractmethod
    def _fill(self, adapter: Installable, folder: Path, dtype: str) -> None:
        """Make the folder that a portable load names, whole or not at all. Raises InvalidRequest or Unfit."""

    def _check_serves(self, bases: Collection[str]) -> None:
        """Whether our base is among those that the server answers to. Raises EngineFailed."""
        if self.settings.base not in bases:
            raise EngineFailed(
                f"the server at {self._where()} serves {', '.join(bases) or 'nothing'}, not {self.settings.base}",
                field="base",
            )

    def _heed(self, facts: EngineFacts | None) -> None:
        """Load through the arena where the server says that it reads it, and tell operators where it doesn't."""
        self._takes_extents = facts is not None and facts.arena
        if not self._takes_extents:
            self._warn("it can't read the arena: adapters are written to folders for it, and load slowly")

    async def start(self) -> None:
        """Attach, adopt or spawn; READY comes later. Raises EngineFailed where the process can't be started."""
        if self._process is not None:
            await self._start_process(self._process)
        await self._close_client()
        self._client = self._client_of(*self._address, self._token)
        self._limits, self._answered_at, self._pulse, self._dead, self.detail = None, None, None, False, ""
        self._remark = ""
        self._started_at = time.monotonic()

    async def _start_process(self, process: EngineProcess) -> None:
        command = self._command()
        if not self._dead and process.adopt(command) and process.record is not None:
            logger.info("engine %s: adopted process %d", self.settings.name, process.record.pid)
        else:
            await to_the_end(self._folders.clear)
            record = await asyncio.to_thread(process.spawn, command, host=self.settings.host, port=self.settings.port)
            logger.info("engine %s: started process %d on port %d", record.name, record.pid, record.port)
        assert process.record is not None
        self._address = (process.record.host, process.record.port)
        self._token = process.record.token

    async def health(self) -> Health:
        """Asks the server and looks at the process. ``detail`` says why it is DEAD, or READY without a word."""
        if self._client is None:
            return Health.STARTING
        if self._ended():
            return self._died_with_its_process()
        try:
            well = await self._client.health(HEALTH_TIMEOUT_S)
        except Unreachable as error:
            if self._ended():
                return self._died_with_its_process()
            if self._answered_at is not None:
                return self._died(error.message)
            return self._still_starting(error.message)
        except Unanswered as error:
            if self._answered_at is None:
                return self._still_starting(error.message)
            return self._silent(self._answered_at, error.message)
        if not well and self._answered_at is None and self.says_so_while_it_starts:
            return self._still_starting("the server answers, and is not ready yet")
        if not well:
            return self._died("the server answers, but its engine core is gone")
        self._answered_at, self._pulse, self.detail = time.monotonic(), None, self._remark
        return Health.READY

    def _silent(self, answered_at: float, message: str) -> Health:
        """Silence of a server that was well means death, but later where its processes are at work."""
        now = time.monotonic()
        worked_at = self._feel_pulse(now)
        silent_s = now - answered_at
        if now - max(answered_at, worked_at or answered_at) > SILENCE_S or silent_s > BUSY_SILENCE_S:
            return self._died(f"silent for {silent_s:.0f} s: {message}")
        if worked_at is not None:
            self.detail = f"busy: silent for {silent_s:.0f} s, and at work"
        return Health.READY

    def _feel_pulse(self, now: float) -> float | None:
        if self._process is None:
            return None
        cpu_s = self._process.cpu_s()
        if self._pulse is None:
            self._pulse = Pulse(now, cpu_s)
        self._pulse.feel(now, cpu_s)
        return self._pulse.worked_at

    def _ended(self) -> bool:
        return self._process is not None and not self._process.alive

    def _died_with_its_process(self) -> Health:
        assert self._process is not None
        return self._died(f"its process ended; the end of its log:\n{self._process.log_tail()}")

    def _still_starting(self, message: str) -> Health:
        waited = time.monotonic() - self._started_at
        if waited > self.settings.start_timeout_s:
            return self._died(f"not ready after {waited:.0f} s: {message}")
        return Health.STARTING

    def _died(self, why: str) -> Health:
        if not self._dead:
            logger.warning("engine %s is dead: %s", self.settings.name, why)
        self._dead = True
        self.detail = why
        return Health.DEAD

    def _warn(self, remark: str) -> None:
        logger.warning("engine %s: %s", self.settings.name, remark)
        self._remark = f"{self._remark}; {remark}" if self._remark else remark

    async def install(self, adapter: Installable, timeout_s: float) -> None:
        """Have the engine load the adapter. Raises InstallRefused, InstallFailed or InstallUncertain."""
        deadline = time.monotonic() + timeout_s
        limits = await self._limits_for_install()
        if adapter.rank > limits.max_rank:
            raise InstallRefused(f"rank {adapter.rank} is above this engine's {limits.max_rank}", field="rank")
        if not (self._takes_extents and adapter.segment and await self._load_extent(adapter, limits, deadline)):
            async with self._my_turn(deadline):
                await self._load_folder(adapter, limits.dtype, deadline)

    async def _load_extent(self, adapter: Installable, limits: EngineLimits, deadline: float) -> bool:
        """False where the engine can't map the arena, which is remembered."""
        try:
            async with self._one_of(limits.calls_at_once, deadline):
                await self._load(adapter, str(extent_of(adapter)), deadline)
        except ArenaOutOfReach as error:
            if self._takes_extents:
                self._warn(f"it can't read the arena ({error.message}): adapters are written to folders for it")
            self._takes_extents = False
            return False
        return True

    async def _load_folder(self, adapter: Installable, dtype: str, deadline: float) -> None:
        folder = await self._write(adapter, dtype)
        try:
            await self._load(adapter, str(folder), deadline)
        except (InstallRefused, InstallFailed):
            await to_the_end(self._folders.discard, adapter.adapter)
            raise

    async def _load(self, adapter: Installable, path: str, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise InstallFailed(f"there was no time left to load {adapter.adapter}")
        try:
            await self._connected().load(adapter.adapter, path, left_s)
        except InstallUncertain as error:
            if self._process is not None and not self._process.alive:
                raise InstallFailed(f"the engine ended meanwhile: {error.message}") from error
            raise

    async def _limits_for_install(self) -> EngineLimits:
        try:
            return await self.limits()
        except EngineFailed as error:
            raise InstallFailed(error.message) from error

    async def _write(self, adapter: Installable, dtype: str) -> Path:
        try:
            return await to_the_end(
                self._folders.write, adapter.adapter, lambda folder: self._fill(adapter, folder, dtype)
            )
        except (InvalidRequest, Unfit) as error:
            raise InstallRefused(error.message, field=error.field) from error
        except (StorageFull, ArtifactUnavailable) as error:
            raise InstallFailed(error.message) from error

    def _one_of(self, calls: int, deadline: float) -> AbstractAsyncContextManager[None]:
        """One of so many calls that may be under way, which whoever calls sees to where they are many."""
        return self._my_turn(deadline) if calls == 1 else nullcontext()

    @asynccontextmanager
    async def _my_turn(self, deadline: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._turn.acquire()
        except TimeoutError as error:
            raise InstallFailed("other loads of this engine took all the time there was") from error
        try:
            yield
        finally:
            self._turn.release()

    async def installed(self) -> frozenset[str]:
        """All adapters that answer. Clears up folders that nobody needs any more. Raises EngineFailed."""
        cards = await self._connected().models(ASK_TIMEOUT_S)
        names = frozenset(card.id for card in cards if card.parent is not None)
        if not self._turn.locked():
            # a load that runs may be about to use a folder that looks forgotten
            async with self._turn:
                await to_the_end(self._folders.sweep, names, now=time.time())
        return names

    async def stop(self) -> None:
        """End the engine if it is ours, with everything it started."""
        await self._close_client()
        if self._process is not None:
            grace_s = 0.0 if self._dead else STOP_GRACE_S
            await asyncio.to_thread(self._process.stop, grace_s=grace_s)
            await to_the_end(self._folders.clear)

    async def detach(self) -> None:
        """Close our connections; the engine goes on, and the next driver adopts it."""
        await self._close_client()

    def address(self) -> tuple[str, int]:
        return self._address

    def token(self) -> str:
        return self._token

    @property
    def pid(self) -> int | None:
        """The engine's process, where it is one of this host that we started."""
        record = self._process.record if self._process is not None else None
        return record.pid if record is not None else None

    def _connected(self) -> Client:
        if self._client is None:
            raise EngineFailed(f"engine {self.settings.name} was not started")
        return self._client

    async def _close_client(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _where(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"


async def to_the_end(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``work`` in a thread; cancelled, this still ends after it.

    As soon as a call has ended, its extent may be given away and its folder written anew: not under a thread's hands.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


def base_at(model_path: str) -> BaseShape | None:
    try:
        return BaseShape.from_config((Path(model_path) / "config.json").read_bytes()) if model_path else None
    except (OSError, InvalidRequest, Unfit) as error:
        logger.warning("the base's config.json can't be read at %s: %s", model_path, error)
        return None


def _key_of(settings: EngineSettings) -> str:
    if not settings.attach_key_env:
        return ""
    key = os.environ.get(settings.attach_key_env, "")
    if not key:
        raise InvalidRequest(
            f"engine {settings.name}: the environment variable {settings.attach_key_env} holds no key",
            field="attach_key_env",
        )
    return key


def _parse_address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"attach {text!r} is not HOST:PORT", field="attach")
    return host.strip("[]"), int(port)
