"""What all engines' HTTP interfaces have in common: calls bounded in time, answers typed, failures told apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import aiohttp
import msgspec

from wire.outcomes import EngineFailed

from .interface import InstallFailed, InstallRefused, InstallUncertain
from .terms import ENGINE_ROUTE, FAILED, OUT_OF_REACH, REFUSED

# the list of models grows with the adapters; nothing else that we read is long
MAX_ANSWER_BYTES = 16 << 20
MAX_MESSAGE_CHARACTERS = 500
# uvicorn closes idle connections after 5 s: a call on one that is just being closed would end as uncertain
IDLE_S = 4.0

T = TypeVar("T")


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


_SIGNS = {REFUSED: InstallRefused, OUT_OF_REACH: ArenaOutOfReach, FAILED: InstallFailed}


class EngineClient(ABC):
    """One server's routes. Make it inside a running loop; ``close`` it there too."""

    load_route: ClassVar[str]

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
            raise EngineFailed(f"{self._url}{ENGINE_ROUTE} answered {status}: {message_of(body)}")
        return _decode(body, EngineFacts)

    async def load(self, adapter: str, path: str, timeout_s: float) -> None:
        """Load an adapter from a folder or an extent; one that is loaded already is fine: its name stands for its
        content.

        Raises InstallRefused, InstallFailed (ArenaOutOfReach too) or InstallUncertain.
        """
        try:
            status, body = await self._call(
                "POST", self.load_route, timeout_s, {"lora_name": adapter, "lora_path": path}
            )
        except Unreachable as error:
            raise InstallFailed(error.message) from error
        except Unanswered as error:
            raise InstallUncertain(error.message) from error
        # an answer may be told to clients: where an adapter lies is not for them
        message = self._said(body, hidden=path)
        if status == 200 or (status == 400 and self._has_it(message)):
            return
        for sign, kind in _SIGNS.items():
            if sign in message:
                raise kind(message.partition(sign)[2])
        if self._will_never(status, message):
            raise InstallRefused(message)
        raise InstallFailed(f"the engine answered {status}: {message}")

    @abstractmethod
    def _has_it(self, message: str) -> bool:
        """Whether a 400 to a load says that the adapter is loaded already."""

    @abstractmethod
    def _will_never(self, status: int, message: str) -> bool:
        """Whether a server without our plug-in says of an adapter that trying again will not help."""

    def _said(self, body: bytes, *, hidden: str = "") -> str:
        """The message of an answer to a load or a removal."""
        return message_of(body, hidden=hidden)

    async def _expect_ok(self, path: str, timeout_s: float) -> bytes:
        status, body = await self._call("GET", path, timeout_s)
        if status != 200:
            raise EngineFailed(f"{self._url}{path} answered {status}: {message_of(body)}")
        return body

    async def _call(
        self, method: str, path: str, timeout_s: float, json: Mapping[str, Any] | None = None
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
        raise EngineFailed(f"the engine's answer is not what was expected: {error}") from error


def message_of(body: bytes, *, hidden: str = "") -> str:
    """The message of an error answer, in any of the engines' forms, or the start of whatever it is.

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
