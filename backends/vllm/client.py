"""vLLM's HTTP interface, as far as the driver needs it: calls bounded in time, answers typed, failures told apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec

from backends.interface import InstallFailed, InstallRefused, InstallUncertain, Removal
from wire.outcomes import EngineFailed

from .terms import ENGINE_ROUTE, FAILED, OUT_OF_REACH, REFUSED

# the list of models grows with the adapters; nothing else that we read is long
MAX_ANSWER_BYTES = 16 << 20
MAX_MESSAGE_CHARACTERS = 500
# uvicorn closes idle connections after 5 s: a call on one that is just being closed would end as uncertain
IDLE_S = 4.0

T = TypeVar("T")

# what a stock server says, with a plain 500, of adapters that it will never load
_STOCK_REFUSAL = re.compile(
    r"max_lora_rank|target modules|The size of tensor|must match the|doesn't contain tensors|does not support"
    r"|not supported|vLLM only supports|Missing required configuration|deserializing header|must be a positive",
)


# what passes, though a server that runs without our plug-in may call it the caller's fault
_PASSING = re.compile(r"out of memory|not enough memory|can't allocate|cannot allocate|no space left", re.IGNORECASE)


class ModelCard(msgspec.Struct, frozen=True):
    """One line of ``/v1/models``: an adapter names its base as ``parent``; a base's ``root`` is where its files are."""

    id: str
    root: str | None = None
    parent: str | None = None


class _ModelList(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...]


class EngineFacts(msgspec.Struct, frozen=True):
    """What our plug-in reports. ``adapters`` maps each adapter to the number of unfinished requests that name it.

    ``arena``: a load may name an extent of the host's arena.
    """

    plugin: int
    slots: int
    max_rank: int
    dtype: str
    targets: tuple[str, ...]
    adapters: dict[str, int]
    arena: bool = False


class Unreachable(EngineFailed):
    """Nobody listens at the address: the request was not sent."""


class Unanswered(EngineFailed):
    """The request may have been sent, and its answer did not come in time or not whole."""


class ArenaOutOfReach(InstallFailed):
    """The engine can't map the arena's segment."""


class VllmClient:
    """One server's routes. Make it inside a running loop; ``close`` it there too."""

    def __init__(self, host: str, port: int, token: str = "") -> None:
        self._url = f"http://{host}:{port}"
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connector = aiohttp.TCPConnector(keepalive_timeout=IDLE_S)
        self._session = aiohttp.ClientSession(trust_env=False, headers=headers, connector=connector)

    async def close(self) -> None:
        await self._session.close()

    async def health(self, timeout_s: float) -> bool:
        """Whether the engine behind the server lives. Raises Unreachable or Unanswered."""
        status, _ = await self._call("GET", "/health", timeout_s)
        return status == 200

    async def models(self, timeout_s: float) -> tuple[ModelCard, ...]:
        """Every name that the server answers to. Raises EngineFailed."""
        body = await self._expect_ok("/v1/models", timeout_s)
        return _decode(body, _ModelList).data

    async def facts(self, timeout_s: float) -> EngineFacts | None:
        """What our plug-in reports; None where the server runs without it. Raises EngineFailed."""
        status, body = await self._call("GET", ENGINE_ROUTE, timeout_s)
        if status == 404:
            return None
        if status != 200:
            raise EngineFailed(f"{self._url}{ENGINE_ROUTE} answered {status}: {_message(body)}")
        return _decode(body, EngineFacts)

    async def takes_adapters(self, timeout_s: float) -> bool:
        """Whether the server has its load route, which exists only where run-time updating is allowed."""
        status, _ = await self._call("GET", "/v1/load_lora_adapter", timeout_s)
        return status == 405

    async def load(self, adapter: str, path: str, timeout_s: float) -> None:
        """Load an adapter from a folder or an extent; one that is loaded already is fine: its name stands for its
        content.

        Raises InstallRefused, InstallFailed (ArenaOutOfReach too) or InstallUncertain.
        """
        call = {"lora_name": adapter, "lora_path": path}
        try:
            status, body = await self._call("POST", "/v1/load_lora_adapter", timeout_s, call)
        except Unreachable as error:
            raise InstallFailed(error.message) from error
        except Unanswered as error:
            raise InstallUncertain(error.message) from error
        # an answer may be told to clients: where an adapter lies is not for them
        message = _message(body, hidden=path)
        if status == 200 or (status == 400 and "already been loaded" in message):
            return
        if REFUSED in message:
            raise InstallRefused(message.partition(REFUSED)[2])
        if OUT_OF_REACH in message:
            raise ArenaOutOfReach(message.partition(OUT_OF_REACH)[2])
        if FAILED in message:
            raise InstallFailed(message.partition(FAILED)[2])
        refused = status == 400 or (status == 500 and _STOCK_REFUSAL.search(message))
        if refused and not _PASSING.search(message):
            raise InstallRefused(message)
        raise InstallFailed(f"the engine answered {status}: {message}")

    async def unload(self, adapter: str, timeout_s: float) -> Removal:
        """Unload an adapter; REMOVED stands for the server's 200, whatever that is worth. Raises EngineFailed."""
        status, body = await self._call("POST", "/v1/unload_lora_adapter", timeout_s, {"lora_name": adapter})
        removal = {200: Removal.REMOVED, 404: Removal.ABSENT, 409: Removal.BUSY}.get(status)
        if removal is None:
            raise EngineFailed(f"the engine answered {status} to the removal of {adapter}: {_message(body)}")
        return removal

    async def _expect_ok(self, path: str, timeout_s: float) -> bytes:
        status, body = await self._call("GET", path, timeout_s)
        if status != 200:
            raise EngineFailed(f"{self._url}{path} answered {status}: {_message(body)}")
        return body

    async def _call(
        self, method: str, path: str, timeout_s: float, json: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        where = f"{self._url}{path}"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, where, json=json, timeout=timeout) as answer:
                body = await answer.content.read(MAX_ANSWER_BYTES)
                while not answer.content.at_eof():
                    if len(body) >= MAX_ANSWER_BYTES:
                        raise Unanswered(f"{where} answered with more than {MAX_ANSWER_BYTES} bytes")
                    body += await answer.content.read(MAX_ANSWER_BYTES - len(body))
                return answer.status, body
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(f"nobody answers at {where}: {error}") from error
        except TimeoutError as error:
            raise Unanswered(f"{where} did not answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise Unanswered(f"{where} broke off: {error}") from error


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise EngineFailed(f"the engine's answer is not what vLLM answers: {error}") from error


def _message(body: bytes, *, hidden: str = "") -> str:
    """The message of an error answer, in either of vLLM's forms, or the start of whatever it is.

    The path ``hidden``, where it is named, becomes "the adapter".
    """
    try:
        answer: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = body.decode(errors="replace")
    if isinstance(answer, dict):
        inner = answer.get("error", answer)
        answer = inner.get("message", inner) if isinstance(inner, dict) else inner
    text = str(answer)
    return (text.replace(hidden, "the adapter") if hidden else text)[:MAX_MESSAGE_CHARACTERS]
