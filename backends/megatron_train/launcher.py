"""Starts and ends the ranks' processes, and asks all of them the same. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from backends.process import python
from backends.trainer import TrainerSettings
from wire.outcomes import DeadlinePassed, EngineFailed
from wire.requester import Requester
from wire.trainer import MAX_TRAINER_BYTES, AnswerOfRank, AskLimits, AskOfRank, EndRank

from .agent import CONTROL_VARIABLE
from .rank import RankSettings, endpoint_of

_LOG_TAIL_BYTES = 4096
_SOCKETS_PREFIX = "roost-trainer-"
_END_S = 5.0


class RanksDied(EngineFailed):
    """At least one rank is gone, or does not answer: all have to be started anew."""


class Ranks(Protocol):
    """All ranks of a trainer, asked as one."""

    async def start(self) -> None:
        """Start them, ending those that run. Returns when all have loaded the base. Raises RanksDied."""

    async def ask(self, ask: AskOfRank, *, timeout_s: float) -> Sequence[AnswerOfRank]:
        """Every rank's answer, in the order of ranks. Raises RanksDied."""

    @property
    def alive(self) -> bool:
        """Whether all run, as far as is known."""

    async def stop(self) -> None:
        """End them."""


class RankProcesses:
    """Ranks on this host, under torchrun."""

    def __init__(self, settings: TrainerSettings, *, state_dir: Path, log_dir: Path) -> None:
        self._settings = settings
        self._scratch = state_dir / "scratch"
        self._sockets_link = state_dir / "sockets"
        self.log = log_dir / f"trainer-{settings.name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._sockets: Path | None = None
        self._requesters: list[Requester[AskOfRank, AnswerOfRank]] = []

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        await self._end()
        await self._spawn()
        try:
            await self.ask(AskLimits(), timeout_s=self._settings.start_timeout_s)
        except RanksDied as error:
            await self._end()
            raise RanksDied(f"{error.message}; the end of {self.log}:\n{self.log_tail()}") from None

    async def ask(self, ask: AskOfRank, *, timeout_s: float) -> Sequence[AnswerOfRank]:
        process = self._process
        if process is None:
            raise RanksDied(f"the ranks of trainer {self._settings.name} do not run")
        tasks = [asyncio.ensure_future(requester.request(ask, timeout_s=timeout_s)) for requester in self._requesters]
        watch = asyncio.ensure_future(process.wait())
        try:
            waiting = {*tasks}
            while waiting:
                done, _ = await asyncio.wait({*waiting, watch}, return_when=asyncio.FIRST_COMPLETED)
                if watch in done:
                    raise RanksDied(f"a rank of trainer {self._settings.name} died")
                for task in done:
                    task.result()
                waiting -= done
            return [task.result() for task in tasks]
        except DeadlinePassed:
            raise RanksDied(f"a rank of trainer {self._settings.name} did not answer in {timeout_s:g} s") from None
        finally:
            for task in (*tasks, watch):
                task.cancel()
            await asyncio.gather(*tasks, watch, return_exceptions=True)

    async def stop(self) -> None:
        if self.alive and self._process is not None:
            with contextlib.suppress(RanksDied, TimeoutError):
                await self.ask(EndRank(), timeout_s=_END_S)
                async with asyncio.timeout(_END_S):
                    await self._process.wait()
        await self._end()

    async def _end(self) -> None:
        """End the processes, however they are."""
        process, self._process = self._process, None
        for requester in self._requesters:
            requester.close()
        self._requesters = []
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                # the ranks are in sessions of their own, and end with their parent
                process.kill()
            await process.wait()
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
            self._sockets = None

    def log_tail(self) -> str:
        """The end of the ranks' log, for an error message."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                return log.read().decode(errors="replace").strip()
        except FileNotFoundError:
            return ""

    async def _spawn(self) -> None:
        settings = self._settings
        if importlib.util.find_spec("megatron") is None:
            raise EngineFailed(f"trainer {settings.name}: megatron-core is not installed (extra: megatron)")
        self._sockets = _socket_folder(self._sockets_link)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        file = self._sockets / "settings.json"
        file.write_bytes(msgspec.json.encode(RankSettings(settings, str(self._sockets), str(self._scratch))))
        threads = settings.threads or max(1, (os.cpu_count() or 1) // settings.world_size)
        # threads that spin while they wait make a rank ten times slower on a host that has other work
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "OMP_NUM_THREADS": str(threads), **settings.env}
        environment[CONTROL_VARIABLE] = str(os.getpid())
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".log.1"))
        argv = [python(), "-m", "backends.megatron_train.agent", str(settings.world_size), str(file)]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self._requesters = [
            Requester(
                endpoint_of(str(self._sockets), rank),
                AskOfRank,
                AnswerOfRank,
                peer=f"rank {rank} of trainer {settings.name}",
                gone=RanksDied,
                patience_s=settings.start_timeout_s,
                max_bytes=MAX_TRAINER_BYTES,
            )
            for rank in range(settings.world_size)
        ]


def _socket_folder(link: Path) -> Path:
    """A short path: those of sockets are bounded to some hundred characters.

    ``link`` points to it from now on, and did to what an earlier life left when it was killed, which goes.
    """
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        left = link.readlink()
        if left.name.startswith(_SOCKETS_PREFIX):
            shutil.rmtree(left, ignore_errors=True)
        link.unlink()
    folder = Path(tempfile.mkdtemp(prefix=_SOCKETS_PREFIX))
    link.symlink_to(folder)
    return folder
