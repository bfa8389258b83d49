"""A client of the training API. Operations leave before earlier ones are done, as the stock SDKs send them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from wire.outcomes import DeadlinePassed, EngineFailed

# what is asked again: no result yet, too many at once, not there yet
_AGAIN = {408, 429, 503}
_PAUSE_S = 0.2
_PATIENCE_S = 900.0


class TrainingClient:
    """Over a gateway that lets everybody in. Make it inside a running loop; ``close`` it there too."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/api/v1"
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        await self._http.close()

    async def begin(self, base: str, name: str, *, rank: int, seed: int) -> Run:
        """A session of its own, and a run in it that trains the policy ``name``."""
        made = await self.ask("create_session", {"user_metadata": {"policy": name}})
        session = str(made["session_id"])
        new = {
            "session_id": session, "model_seq_id": 0, "base_model": base, "lora_config": {"rank": rank, "seed": seed},
        }  # fmt: skip
        created = await self.result(await self.submit("create_model", new))
        return Run(self, session, str(created["model_id"]))

    async def submit(self, path: str, body: Any) -> str:
        """Have an operation taken; its request id."""
        return str((await self.ask(path, body))["request_id"])

    async def result(self, request_id: str) -> Any:
        """Raises EngineFailed with what the operation failed with."""
        told = await self.ask("retrieve_future", {"request_id": request_id})
        if "error" in told:
            raise EngineFailed(f"a training operation failed: {told['error']}")
        return told

    async def ask(self, path: str, body: Any) -> Any:
        """Raises EngineFailed for a refusal, DeadlinePassed where nothing came of asking again and again."""
        data = msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while True:
                    async with self._http.post(f"{self._url}/{path}", data=data, headers=headers) as answer:
                        told = await answer.read()
                    if answer.status == 200:
                        return msgspec.json.decode(told)
                    if answer.status not in _AGAIN:
                        raise EngineFailed(f"{path} was answered with {answer.status}: {told.decode()[:500]}")
                    if answer.status != 408:
                        await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise DeadlinePassed(f"{path} got no result within {_PATIENCE_S:g} s") from None


class Run:
    """One run. Its operations have their places in the order in which they are called here."""

    def __init__(self, client: TrainingClient, session: str, model_id: str) -> None:
        self._client = client
        self._session = session
        self.model_id = model_id
        self._operations = 0
        self._samplers = 0
        self._samples: dict[str, int] = {}

    async def forward_backward(self, data: Sequence[dict[str, Any]], loss: str) -> Any:
        return await self._operate("forward_backward", {"forward_backward_input": {"data": data, "loss_fn": loss}})

    async def optim_step(self, learning_rate: float) -> Any:
        return await self._operate("optim_step", {"adam_params": {"learning_rate": learning_rate}})

    async def save_for_sampler(self) -> str:
        """Publish the run as it is; the sampling session on what was published."""
        number, self._samplers = self._samplers, self._samplers + 1
        saved = await self._operate("save_weights_for_sampler", {"sampling_session_seq_id": number})
        return str(saved["sampling_session_id"])

    async def sample(self, sampler: str, prompt: Sequence[int], count: int, tokens: int) -> list[dict[str, Any]]:
        """``count`` sequences of exactly ``tokens`` tokens: each with its ``tokens`` and ``logprobs``."""
        number = self._samples[sampler] = self._samples.get(sampler, -1) + 1
        body = {
            "sampling_session_id": sampler, "seq_id": number, "num_samples": count,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            "sampling_params": {"max_tokens": tokens, "stop": [], "seed": number},
        }  # fmt: skip
        told = await self._client.result(await self._client.submit("asample", body))
        sequences: list[dict[str, Any]] = told["sequences"]
        short = [len(one["tokens"]) for one in sequences if len(one["tokens"]) != tokens]
        if short:
            raise EngineFailed(f"a sequence has {short[0]} tokens, and {tokens} were asked for")
        return sequences

    async def finish(self) -> None:
        await self._client.ask(f"sessions/{self._session}/finish", {"reason": {"type": "success"}})

    async def _operate(self, path: str, fields: dict[str, Any]) -> Any:
        self._operations += 1
        body = {"model_id": self.model_id, "seq_id": self._operations, **fields}
        return await self._client.result(await self._client.submit(path, body))


def datum(tokens: Sequence[int], targets: Sequence[int], **inputs: Sequence[float]) -> dict[str, Any]:
    """One sequence as the API takes it; ``inputs`` are the loss's, one value a target."""
    given: dict[str, Any] = {"target_tokens": {"data": list(targets), "dtype": "int64", "shape": [len(targets)]}}
    for name, values in inputs.items():
        given[name] = {"data": list(values), "dtype": "float32", "shape": [len(values)]}
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]},
        "loss_fn_inputs": given,
    }
