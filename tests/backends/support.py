"""What the tests of engines share: revisions as a sidecar would hand them over, and requests as a gateway would."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec

from backends.interface import EngineBackend, EngineSettings, Health, Installable, Removal
from backends.registry import dialect_of
from backends.vllm.client import VllmClient
from catalog.names import adapter_name
from gateway.training.completions import read_answer, request_body
from gateway.training.work import Sample, Sampled
from packer.peft import pack_peft
from packer.shape import BaseShape
from sidecar.arena import Arena
from sidecar.extents import HEADER_BYTES, Extent, block_bytes
from tests.models import chat_prompt
from wire.outcomes import InvalidRequest

PROMPT = "hello there"


def installable(folder: Path, base: Path, *, tenant: str = "acme", claim_rank: int | None = None) -> Installable:
    """The revision packed from a PEFT folder, with its bytes in memory."""
    packed = io.BytesIO()
    facts = pack_peft(folder, BaseShape.from_config((base / "config.json").read_bytes()), packed)
    return from_bytes(packed.getvalue(), facts.digest, claim_rank or facts.rank, tenant=tenant)


def from_bytes(data: bytes, digest: str, rank: int, *, tenant: str = "acme") -> Installable:
    return Installable(
        adapter=adapter_name(tenant, digest),
        digest=digest,
        rank=rank,
        segment="",
        offset=0,
        length=len(data),
        generation=1,
        view=lambda: memoryview(data),
    )


def tiny_settings(model: Path, **changes: Any) -> EngineSettings:
    """Exact and small: float32, two slots of rank 8, contexts of 256 tokens."""
    settings: dict[str, Any] = {
        "name": "tiny", "base": "tiny-base", "model_path": str(model), "fingerprint": "f" * 64, "slots": 2,
        "max_rank": 8, "dtype": "float32", "max_model_len": 256, "kv_cache_bytes": 64 << 20, "device": "cpu",
    }  # fmt: skip
    return EngineSettings(**(settings | changes))


async def until_ready(backend: EngineBackend, seconds: float = 120.0) -> float:
    """Seconds until READY; fails with the driver's reason where the engine dies."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        health = await backend.health()
        if health is Health.READY:
            return time.monotonic() - started
        assert health is not Health.DEAD, backend.detail
        await asyncio.sleep(0.1)
    raise AssertionError(f"not ready within {seconds:g} s")


async def until_dead(backend: EngineBackend, seconds: float = 10.0) -> float:
    started = time.monotonic()
    while await backend.health() is not Health.DEAD:
        assert time.monotonic() - started < seconds, "still not noticed"
        await asyncio.sleep(0.05)
    return time.monotonic() - started


class Caller:
    """Sends completions straight to an engine."""

    def __init__(self, backend: EngineBackend, base: Path) -> None:
        host, port = backend.address()
        self.url = f"http://{host}:{port}"
        self._settings = backend.settings
        self._dialect = dialect_of(backend.settings.backend)
        self._prompt = chat_prompt(base, PROMPT)
        token = backend.token()
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            # servers close idle connections, and a busy machine may send on one just then
            connector=aiohttp.TCPConnector(force_close=True),
        )

    async def close(self) -> None:
        await self._session.close()

    def _called(self, model: str) -> str:
        return self._dialect.model(self._settings.base, model)

    async def asked(self, model: str, ask: Sample, **changes: Any) -> tuple[int, bytes]:
        """(status, body) of a sample as the training service asks for it, ``changes`` made to the request."""
        body = request_body(self._called(model), ask, most_tokens=self._settings.max_model_len) | changes
        fields = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in body.items()}
        try:
            asked = self._dialect.ask("/v1/completions", fields)
        except InvalidRequest as error:
            return 400, error.message.encode()
        data = msgspec.json.encode(asked.fields)
        headers = {"content-type": "application/json"}
        async with self._session.post(self.url + asked.path, data=data, headers=headers) as answer:
            found = await answer.read()
            if answer.status != 200:
                return self._dialect.refusal(answer.status, found)
            return 200, asked.answer(found) if asked.answer else found

    async def sample(self, model: str, ask: Sample) -> Sampled:
        status, body = await self.asked(model, ask)
        assert status == 200, body
        return read_answer(ask, body)

    def _body(self, model: str, max_tokens: int, stream: bool) -> dict[str, Any]:
        return {
            "model": self._called(model), "prompt": self._prompt, "max_tokens": max_tokens, "temperature": 0,
            "stream": stream,
        }  # fmt: skip

    async def complete(self, model: str, max_tokens: int = 24, prompt: str = "") -> tuple[int, str]:
        """(status, text): greedy, and the error's text where there is one."""
        body = self._body(model, max_tokens, False) | ({"prompt": prompt} if prompt else {})
        async with self._session.post(f"{self.url}/v1/completions", json=body) as answer:
            body = await answer.json()
            return answer.status, body["choices"][0]["text"] if answer.status == 200 else json.dumps(body)

    async def cached_tokens(self, model: str, prompt: str) -> int:
        """How many tokens of ``prompt`` the engine had in its prefix cache."""
        body = self._body(model, 1, False) | {"prompt": prompt}
        async with self._session.post(f"{self.url}/v1/completions", json=body) as answer:
            found = await answer.json()
            assert answer.status == 200, found
            return int((found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    async def probabilities(self, model: str, prompt: str = "", max_tokens: int = 8) -> Any:
        """What the engine makes of the prompt and its own tokens: all log-probabilities, exactly as it tells them."""
        body = self._body(model, max_tokens, False) | {"logprobs": 5, "echo": True}
        body |= {"prompt": prompt} if prompt else {}
        async with self._session.post(f"{self.url}/v1/completions", json=body) as answer:
            found = await answer.json()
            assert answer.status == 200, found
            return found["choices"][0]["logprobs"]

    async def stream(self, model: str, max_tokens: int, started: asyncio.Event) -> str:
        """Read a stream to its end, setting ``started`` at its first token. Returns the text."""
        text = ""
        async with self._session.post(f"{self.url}/v1/completions", json=self._body(model, max_tokens, True)) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
                    started.set()
        return text

    async def get(self, path: str) -> Any:
        async with self._session.get(f"{self.url}{path}") as answer:
            return await answer.json()

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        async with self._session.post(f"{self.url}{path}", json=body) as answer:
            return answer.status, await answer.text()


class EngineStage:
    """A running engine with its driver; ``folder`` is for tests to define."""

    root: Path
    base: Path
    backend: EngineBackend

    def folder(self, seed: int) -> Path:
        """A PEFT folder, made once a seed."""
        raise NotImplementedError

    async def load(self, name: str, path: str) -> None:
        """Past the driver, as stock would."""
        client = VllmClient(*self.backend.address(), self.backend.token())
        try:
            await client.load(name, path, 30)
        finally:
            await client.close()

    async def load_from_disk(self, seed: int) -> str:
        name = adapter_name("stock", f"{seed:064x}")
        await self.load(name, str(self.folder(seed)))
        return name

    async def empty(self) -> None:
        """Remove every adapter, once the requests of the test before are through."""
        for adapter in await self.backend.installed():
            for _ in range(100):
                if await self.backend.remove(adapter, 10) is not Removal.BUSY:
                    break
                await asyncio.sleep(0.05)
        assert await self.backend.installed() == frozenset()

    @asynccontextmanager
    async def running(self, seconds: float = 120.0) -> AsyncIterator[Self]:
        """Started, ready within ``seconds``, and stopped at the end."""
        await self.backend.start()
        try:
            await until_ready(self.backend, seconds)
            yield self
        finally:
            await self.backend.stop()

    @asynccontextmanager
    async def called(self) -> AsyncIterator[Caller]:
        """A caller of the engine, which has no adapters."""
        await self.empty()
        caller = Caller(self.backend, self.base)
        try:
            yield caller
        finally:
            await caller.close()


class SharedArena:
    """A segment as a sidecar keeps it, in the host's shared memory, with revisions put one behind the other."""

    def __init__(self, name: str, size: int = 64 << 20) -> None:
        self.segment = f"roost-{name}-{os.getpid()}"
        self._size = size
        self.renew()

    def renew(self) -> None:
        """Make the segment anew under its name, as the next life of a sidecar does."""
        self.arena = Arena(self.segment, self._size)
        self._end = 0
        self._generation = 0
        self._extents: dict[str, Extent] = {}

    def put(self, folder: Path, base: Path, *, tenant: str = "acme") -> Installable:
        """Pack a PEFT folder into an extent of its own."""
        packed = io.BytesIO()
        facts = pack_peft(folder, BaseShape.from_config((base / "config.json").read_bytes()), packed)
        return self.put_bytes(packed.getvalue(), facts.digest, facts.rank, tenant=tenant)

    def put_bytes(
        self, data: bytes, digest: str, rank: int, *, tenant: str = "acme", over: Installable | None = None
    ) -> Installable:
        """Put bytes where ``over``'s are, or behind the last."""
        self._generation += 1
        offset = over.offset if over is not None else self._end + HEADER_BYTES
        extent = Extent(offset, len(data), self._generation)
        self._end = max(self._end, offset - HEADER_BYTES + block_bytes(len(data)))
        self.arena.begin(extent)[:] = data
        self.arena.seal(extent, digest)
        return Installable(
            adapter=adapter_name(tenant, digest),
            digest=digest,
            rank=rank,
            segment=self.segment,
            offset=extent.offset,
            length=extent.length,
            generation=extent.generation,
            view=lambda: self.arena.read(extent),
        )

    def give_away(self, there: Installable) -> None:
        """Clear the record and overwrite the bytes: whoever still reads them reads something else."""
        extent = Extent(there.offset, there.length, there.generation)
        self.arena.clear(extent)
        self.arena.begin(extent)[:] = b"\x3f" * there.length

    def close(self) -> None:
        self.arena.close()
