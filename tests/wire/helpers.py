"""What the tests of the sockets share: small messages, closing, and waiting for what must come."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from wire.responder import Reply


class Number(msgspec.Struct, frozen=True, tag=True, tag_field="t"):
    value: int
    padding: bytes = b""


class Silence(msgspec.Struct, frozen=True, tag=True, tag_field="t"):
    """An ask that the tests' handlers leave unanswered."""


class Fail(msgspec.Struct, frozen=True, tag=True, tag_field="t"):
    """An ask on which the tests' handlers raise."""


Asks = Number | Silence | Fail


def double(ask: Asks, reply: Reply[Number]) -> None:
    if isinstance(ask, Number):
        reply(Number(ask.value * 2))
    elif isinstance(ask, Fail):
        raise ZeroDivisionError("a bug in the handler")


class Closable(Protocol):
    def close(self) -> None: ...


@contextlib.contextmanager
def closing(*sockets: Closable) -> Iterator[None]:
    try:
        yield
    finally:
        for socket in sockets:
            socket.close()


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - conditions of any kind
            await asyncio.sleep(0.005)
