"""How an engine wants to be asked. The gateway speaks vLLM's OpenAI API; an engine that differs has its own dialect.

Pure functions over JSON bodies; ``registry.dialect_of`` finds a backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec

Fields = Mapping[str, msgspec.Raw]


class Ask(NamedTuple):
    """What is sent in a request's place. ``answer`` turns the body of a 200 into what was asked for, and raises
    EngineFailed where it can't; None leaves the answer as it comes.
    """

    path: str
    fields: Fields
    answer: Callable[[bytes], bytes] | None = None


class Dialect(Protocol):
    """One backend's way of being asked."""

    def model(self, base: str, adapter: str) -> str:
        """What a request's ``model`` must be for ``adapter``; an ``adapter`` of the base's own name is the base."""

    def ask(self, path: str, fields: Fields) -> Ask:
        """The request in the engine's form; the model in ``fields`` is the engine's already. Raises InvalidRequest for
        what this engine can't be asked.
        """

    def refusal(self, status: int, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer other than 200, as vLLM would give them."""


class OpenAI:
    """vLLM's own: nothing to translate."""

    def model(self, base: str, adapter: str) -> str:
        return adapter

    def ask(self, path: str, fields: Fields) -> Ask:
        return Ask(path, fields)

    def refusal(self, status: int, body: bytes) -> tuple[int, bytes]:
        return status, body
