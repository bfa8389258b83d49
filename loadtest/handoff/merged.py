"""The stock way from an adapter to an answer: merge it into the weights, and have an engine load those.

The engine is stock vLLM without adapters. It is ended and another one takes its place, or it loads the new weights
where it is (``reload_weights``), which it does for a server in development mode.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import aiohttp
import msgspec

from backends.interface import EngineSettings
from backends.process import EngineProcess, python
from backends.vllm.command import command_for
from backends.vllm.terms import ACTIVATION
from loadtest.generator import Generator, Sample, completion
from loadtest.training.bases import TrainedBase
from loadtest.training.mesh import NAME, engine_options
from wire.outcomes import EngineFailed

_START_S, _CALL_S, _LOOK_S = 600.0, 300.0, 0.02
_OF_ADAPTERS = ("--enable-lora", "--max-loras", "--max-cpu-loras", "--max-lora-rank")


class Reload(msgspec.Struct, frozen=True):
    """Seconds from an adapter's file to the first token of a model that has it: to the merged weights, to an engine
    that has loaded them, to the token."""

    merge_s: float
    load_s: float
    first_token_s: float

    @property
    def total_s(self) -> float:
        return self.merge_s + self.load_s + self.first_token_s


class MergingEngine:
    """An engine of the base and a merger beside it. ``root`` is a folder of its own.

    Use as a context manager: both are started when it is entered, and ``ready`` waits for them.
    """

    def __init__(self, root: Path, base: TrainedBase) -> None:
        self._root = root
        self._base = base
        self._engine = EngineProcess("merged", run_dir=root / "run", log_dir=root / "log")
        self._merger: subprocess.Popen[str] | None = None
        self._merges = 0

    def __enter__(self) -> Self:
        self._root.mkdir(parents=True)
        self._start_merger()
        self._start_engine(self._base.folder)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End both; nothing happens where they have ended."""
        self._engine.stop(grace_s=5.0)
        if self._merger is not None:
            self._merger.kill()
            self._merger.wait()

    async def ready(self, revision: Path, prompt: Sequence[int]) -> None:
        """Wait until both answer, and have each do once what is slow the first time. Raises EngineFailed."""
        await self._healthy()
        await asyncio.to_thread(self._hear, "ready")
        await self._merged(revision)
        await self.ask(prompt)

    async def restart(self, revision: Path, prompt: Sequence[int]) -> Reload:
        """Another engine takes the running one's place."""
        begun = time.monotonic()
        folder = await self._merged(revision)
        merged = time.monotonic()
        await asyncio.to_thread(self._engine.stop, grace_s=5.0)
        await asyncio.to_thread(self._start_engine, folder)
        await self._healthy()
        return await self._told(begun, merged, prompt)

    async def reload(self, revision: Path, prompt: Sequence[int]) -> Reload:
        """The running engine loads the merged weights. Raises EngineFailed where it can't."""
        begun = time.monotonic()
        folder = await self._merged(revision)
        merged = time.monotonic()
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": _CALL_S}
        await self._call("/collective_rpc", call)
        await self._call("/reset_prefix_cache", None)
        return await self._told(begun, merged, prompt)

    async def ask(self, prompt: Sequence[int]) -> Sample:
        """A token of whatever the engine has loaded. Raises EngineFailed."""
        record = self._engine.record
        if record is None:
            raise EngineFailed("the merging engine does not run")
        generator = Generator(record.host, record.port)
        with contextlib.closing(generator):
            request = completion(NAME, prompt=prompt, tokens=1, token=record.token)
            sample = await generator.one(request, time.monotonic())
        if sample.status != 200:
            raise EngineFailed(f"the merging engine answered {sample.status}: {sample.text}")
        return sample

    async def _told(self, begun: float, merged: float, prompt: Sequence[int]) -> Reload:
        loaded = time.monotonic()
        sample = await self.ask(prompt)
        return Reload(merged - begun, loaded - merged, sample.first_token - loaded)

    async def _merged(self, revision: Path) -> Path:
        """A new folder with the merged weights; the one before it goes."""
        shutil.rmtree(self._root / f"merged-{self._merges}", ignore_errors=True)
        self._merges += 1
        out = self._root / f"merged-{self._merges}"
        job = msgspec.json.encode({"revision": str(revision), "out": str(out)}).decode()
        await asyncio.to_thread(self._tell, job)
        return out

    def _start_merger(self) -> None:
        argv = [python(), "-m", "loadtest.handoff.merging", str(self._base.folder), self._base.device]
        with (self._root / "merger.log").open("w") as log:
            self._merger = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def _tell(self, job: str) -> None:
        assert self._merger is not None and self._merger.stdin is not None, "it was started"
        self._merger.stdin.write(job + "\n")
        self._merger.stdin.flush()
        self._hear("done")

    def _hear(self, word: str) -> None:
        assert self._merger is not None and self._merger.stdout is not None, "it was started"
        if self._merger.stdout.readline().strip() != word:
            raise EngineFailed(f"the merger ended: {(self._root / 'merger.log').read_text()[-2000:]}")

    def _start_engine(self, folder: Path) -> None:
        settings = EngineSettings(name="merged", fingerprint="", **engine_options(self._base))
        made = command_for(msgspec.structs.replace(settings, model_path=str(folder)))
        environment = {name: value for name, value in made.env.items() if name != ACTIVATION}
        stock = msgspec.structs.replace(
            made, argv=_without_adapters(made.argv), env={**environment, "VLLM_SERVER_DEV_MODE": "1"}
        )
        self._engine.spawn(stock, host="127.0.0.1", port=0)

    async def _healthy(self) -> None:
        record = self._engine.record
        assert record is not None, "it was started"
        until = time.monotonic() + _START_S
        async with aiohttp.ClientSession() as http:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"http://{record.host}:{record.port}/health") as answer:
                        if answer.status == 200:
                            return
                if not self._engine.alive or time.monotonic() > until:
                    raise EngineFailed(f"the merging engine did not start: {self._engine.log_tail()}")
                await asyncio.sleep(_LOOK_S)

    async def _call(self, path: str, body: object) -> None:
        record = self._engine.record
        assert record is not None, "it was started"
        headers = {"Authorization": f"Bearer {record.token}"}
        timeout = aiohttp.ClientTimeout(total=_CALL_S)
        url = f"http://{record.host}:{record.port}{path}"
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
            try:
                async with http.post(url, json=body) as answer:
                    if answer.status != 200:
                        raise EngineFailed(f"{path} was answered with {answer.status}: {await answer.text()}")
            except aiohttp.ClientError as error:
                raise EngineFailed(f"{path} broke off: {error}") from error


def _without_adapters(argv: Sequence[str]) -> tuple[str, ...]:
    """The same command without what it says of adapters; all but the first of those flags have a value."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word not in _OF_ADAPTERS:
            kept.append(word)
        elif word != _OF_ADAPTERS[0]:
            next(words)
    return tuple(kept)
