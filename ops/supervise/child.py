"""One supervised process: started, watched until it ends, started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from wire.outcomes import Outcome, RoostError

from .backoff import Backoff
from .state import Identity, Phase, ProcessState

READY_POLL_S = 0.1
TAIL_BYTES = 4096


class StartFailed(RoostError, RuntimeError):
    """A process ended, or did not get ready, while the mesh was starting."""

    outcome = Outcome.ENGINE_FAILED


@dataclass(frozen=True)
class ChildSpec:
    """``module`` is run with ``arguments``; ``ready`` returns once it answers, and raises RoostError until then."""

    name: str
    module: str
    arguments: tuple[str, ...]
    log: Path
    ready: Callable[[], Awaitable[None]]
    start_timeout_s: float = 30.0
    stop_grace_s: float = 5.0


@dataclass
class Child:
    """The process of ``spec`` now. ``on_change`` is called whenever ``state`` is another."""

    spec: ChildSpec
    on_change: Callable[[], None]
    backoff: Backoff = field(default_factory=Backoff)
    state: ProcessState = field(init=False)
    _process: asyncio.subprocess.Process | None = None
    _spawned_at: float = 0.0

    def __post_init__(self) -> None:
        self.state = ProcessState(self.spec.name, Phase.STOPPED)

    async def start(self) -> None:
        """Start it and wait until it is ready. Raises StartFailed with the end of its log."""
        await self._spawn()
        try:
            async with asyncio.timeout(self.spec.start_timeout_s):
                await self._until_ready()
        except TimeoutError:
            raise StartFailed(self._story(f"is not ready after {self.spec.start_timeout_s:g} s")) from None
        assert self._process is not None
        if self._process.returncode is not None:
            raise StartFailed(self._story(f"ended while starting ({_how(self._process.returncode)})"))

    async def keep(self) -> None:
        """Restart it whenever it ends, until cancelled."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            delay = self.backoff.after_exit(time.monotonic() - self._spawned_at)
            self._become(Phase.RESTARTING, detail=f"{_how(code)}; {last_line(self.spec.log)}".rstrip("; "))
            await asyncio.sleep(delay)
            await self._respawn()
            await self._until_ready()

    async def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL after its grace."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._become(Phase.STOPPING)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), self.spec.stop_grace_s)
        except TimeoutError:
            process.kill()
            await process.wait()
        self._become(Phase.STOPPED)

    async def _respawn(self) -> None:
        """Start it again, however long the host has no room for another process or another file."""
        while True:
            try:
                await self._spawn(restarts=self.state.restarts + 1)
            except OSError as error:
                self._become(Phase.RESTARTING, detail=f"it can't be started: {error}")
                await asyncio.sleep(self.backoff.after_exit(0.0))
            else:
                return

    async def _spawn(self, restarts: int = 0) -> None:
        entry = (sys.executable, "-P", "-m", "ops.supervise.entry", str(os.getpid()))
        with self.spec.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *entry,
                self.spec.module,
                *self.spec.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                # a Ctrl-C at the terminal is for the supervisor, which stops them in order
                process_group=0,
            )
        self._spawned_at = time.monotonic()
        self._become(Phase.STARTING, identity=Identity.of(self._process.pid), restarts=restarts)

    async def _until_ready(self) -> None:
        """Until it answers or ends."""
        assert self._process is not None
        while self._process.returncode is None:
            try:
                await self.spec.ready()
            except (RoostError, OSError):
                await asyncio.sleep(READY_POLL_S)
            else:
                self._become(Phase.READY)
                return

    def _become(self, phase: Phase, *, identity: Identity | None = None, restarts: int = -1, detail: str = "") -> None:
        old = self.state
        self.state = ProcessState(
            name=old.name,
            phase=phase,
            identity=identity or old.identity,
            restarts=old.restarts if restarts < 0 else restarts,
            since=time.time(),
            detail=detail or old.detail,
        )
        self.on_change()

    def _story(self, what: str) -> str:
        line = last_line(self.spec.log)
        return f"{self.spec.name} {what}: {line or 'its log is empty'} (see {self.spec.log})"


def last_line(log: Path) -> str:
    """The last line of a log that says something; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
