"""What the tests of the sockets share: small messages, closing, and waiting for what must come."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
import zmq

from wire.sockets import Reply, Requester, Responder


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


LONG_S = 60.0
"""Longer than anything here takes: a test that waits this long has failed."""


def requester(endpoint: str, *, patience_s: float = LONG_S, **options: Any) -> Requester[Asks, Number]:
    return Requester(endpoint, Asks, Number, patience_s=patience_s, **options)


def responder(endpoint: str, **options: Any) -> Responder[Asks, Number]:
    return Responder(endpoint, Asks, Number, double, **options)


@contextlib.contextmanager
def raw_dealer(endpoint: str, *, rcvhwm: int = 1000) -> Iterator[zmq.Socket[bytes]]:
    """A peer that does not speak our wire."""
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvhwm = rcvhwm
        dealer.connect(endpoint)
        yield dealer


class Keeper:
    """A handler that keeps what it is asked, for the test to answer."""

    def __init__(self) -> None:
        self.asks: list[Asks] = []
        self.replies: list[Reply[Number]] = []

    def __call__(self, ask: Asks, reply: Reply[Number]) -> None:
        self.asks.append(ask)
        self.replies.append(reply)


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - conditions of any kind
            await asyncio.sleep(0.005)
