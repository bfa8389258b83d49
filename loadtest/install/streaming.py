"""One stream of tokens of the base, kept open while adapters are loaded, and when each token came."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

import aiohttp

from .bases import CONTEXT

# stock loads of 16 adapters keep an engine from its steps for a minute
_PATIENCE_S = 300.0
_PROMPT = list(range(2, 18))


class TokenStream:
    """Asks an engine for a long answer and notes when each part of it came, in seconds of the monotonic clock.

    ``patience_s``: a stream that is silent for longer has come to a halt.
    """

    def __init__(self, url: str, token: str, model: str, *, patience_s: float = _PATIENCE_S) -> None:
        self._url, self._model, self._patience_s = url, model, patience_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.times: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> TokenStream:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def more(self, count: int) -> None:
        """Wait for ``count`` further tokens. Raises RuntimeError where the stream ended or came to a halt instead."""
        goal = len(self.times) + count
        begun = time.monotonic()
        while len(self.times) < goal:
            assert self._task is not None
            if self._task.done():
                raise RuntimeError(f"the stream ended after {len(self.times)} tokens: {self._task.exception()}")
            if time.monotonic() - max([begun, *self.times[-1:]]) > self._patience_s:
                raise RuntimeError(f"no token for {self._patience_s:g} s after the first {len(self.times)}")
            await asyncio.sleep(0.002)

    def since(self, moment: float) -> list[float]:
        """When tokens came from the last one before ``moment`` on."""
        before = [at for at in self.times if at < moment]
        return [*before[-1:], *self.times[len(before) :]]

    async def _read(self) -> None:
        body = {
            "model": self._model, "prompt": _PROMPT, "max_tokens": CONTEXT - len(_PROMPT) - 1, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True, "detokenize": False,
        }  # fmt: skip
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
            session.post(f"{self._url}/v1/completions", json=body) as answer,
        ):
            if answer.status != 200:
                raise RuntimeError(f"the engine answered {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    self.times.append(time.monotonic())
