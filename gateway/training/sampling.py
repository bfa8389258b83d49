"""Samples: asked of the gateway like any client, on the revision that was asked for, as often as it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec

from wire.outcomes import (
    DeadlinePassed,
    EngineFailed,
    InvalidRequest,
    NoHealthyNode,
    NotFound,
)

from .completions import explained, read_answer, request_body
from .failures import failed, until_written
from .futures import Futures
from .journal import Journal
from .records import OperationRecord, SamplerRecord
from .work import AnyResult, Sample, Sampled

# the client's own fault, as the gateway says
_FAULTS = {400, 404, 409, 410, 413}
# what may be otherwise soon
_LATER = {429, 502, 503, 504}
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 5.0
_MAX_ENGINE_FAILURES = 3


class _Error(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error


class GatewayClient:
    """The gateway, as a client with the service's own key sees it. Made and used on one event loop.

    ``most_tokens`` is what it lets one request have generated. A sequence without a bound may have as many as
    ``context`` says: engines refuse a number above their own context.
    """

    def __init__(
        self, url: str, key_file: str, *, timeout_s: float, most_tokens: int, context: Callable[[], Awaitable[int]]
    ) -> None:
        self._url = url
        self._most_tokens = most_tokens
        self._context = context
        self._key_file = Path(key_file) if key_file else None
        self._timeout_s = timeout_s
        self._http: aiohttp.ClientSession | None = None
        self.paused = ""

    async def sample(self, model: str, ask: Sample) -> Sampled:
        """Raises InvalidRequest where the gateway finds the request at fault, DeadlinePassed when time is up."""
        most_tokens = self._most_tokens // ask.count
        if ask.max_tokens is None:
            most_tokens = min(most_tokens, await self._context())
        body = msgspec.json.encode(request_body(model, ask, most_tokens))
        wait_s, failures = _FIRST_WAIT_S, 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    status, answer = await self._post(body)
                    if status == 200:
                        self.paused = ""
                        return read_answer(ask, answer)
                    why = _reason(answer)
                    if status in _FAULTS:
                        raise InvalidRequest(explained(ask, why))
                    if status not in _LATER:
                        raise EngineFailed(f"the gateway answered {status} to a sample: {why}")
                    failures += status == 502
                    if failures == _MAX_ENGINE_FAILURES:
                        raise EngineFailed(why)
                    self.paused = why
                    await asyncio.sleep(wait_s)
                    wait_s = min(wait_s * 2, _LONGEST_WAIT_S)
        except TimeoutError:
            raise DeadlinePassed(f"no sample came within {self._timeout_s:g} s: {self.paused}") from None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        """Status and body; 503 where nobody answers."""
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        headers = {"content-type": "application/json"}
        if self._key_file is not None:
            headers["authorization"] = f"Bearer {self._key_file.read_text().strip()}"
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            async with self._http.post(
                f"{self._url}/v1/completions", data=body, headers=headers, timeout=timeout
            ) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, ConnectionError):
            return NoHealthyNode.outcome.http_status, b'{"error": {"message": "the gateway does not answer"}}'


def _reason(answer: bytes) -> str:
    try:
        return msgspec.json.decode(answer, type=_Refusal).error.message
    except msgspec.MsgspecError:
        return "no reason was given"


class Samples:
    """Samples that are asked for, ``at_once`` of them at a time. Started again, it asks for those without a result."""

    def __init__(self, journal: Journal, gateway: GatewayClient, futures: Futures, *, at_once: int) -> None:
        self._journal = journal
        self._gateway = gateway
        self._futures = futures
        self._room = asyncio.Semaphore(at_once)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pending(self) -> int:
        return len(self._tasks)

    @property
    def paused(self) -> str:
        """Why nothing is sampled at the moment; empty where it is."""
        return self._gateway.paused

    def admit(self, operation: OperationRecord) -> None:
        """A sample that is in the journal."""
        task = asyncio.create_task(self._work(operation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """End; samples without a result stay in the journal."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._gateway.close()

    async def _work(self, operation: OperationRecord) -> None:
        async with self._room:
            result = await self._sampled(operation)
        await until_written(lambda: self._journal.resolve(operation, result))
        self._futures.resolved(operation.request_id)

    async def _sampled(self, operation: OperationRecord) -> AnyResult:
        try:
            ask = self._journal.ask(operation.request_id)
            assert isinstance(ask, Sample), "nothing else is asked of a sampling session"
            sampler = self._journal.sampler(operation.owner)
            if sampler is None:
                raise NotFound(f"there is no sampling session {operation.owner}", field="sampling_session_id")
            return await self._gateway.sample(self._model(sampler), ask)
        except Exception as error:
            return failed(error, f"sample {operation.seq} of {operation.owner}")

    def _model(self, sampler: SamplerRecord) -> str:
        """What the gateway is asked for."""
        if not sampler.policy:
            return sampler.base
        run = self._journal.run(sampler.follows) if sampler.follows else None
        return f"{sampler.policy}@{run.inflight if run is not None else sampler.revision}"
