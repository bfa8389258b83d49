"""Clients: a request at its intended time, and what a well-behaved client does when it is told to come back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import msgspec

from .gateway import Answer
from .world import World, completion

# before what broke is tried again
_RESEND_S = 0.5


class Ask(msgspec.Struct, frozen=True):
    """One request to come: seconds from the beginning, and a policy, a revision of it, or the base."""

    at: float
    model: str
    tokens: int = 16
    prompt: int = 64
    stream: bool = True


class Told(msgspec.Struct, frozen=True):
    """A refusal: ``said_s`` is its Retry-After; ``true_s`` is when, from then, a lease led to a first token."""

    said_s: float
    true_s: float


class Result(msgspec.Struct, frozen=True):
    """How one request ended, seconds from the beginning. ``first`` is NaN where no token came.

    ``status`` is the last answer's; ``refusals`` is how often it was told to come back before that.
    """

    asked: Ask
    intended: float
    first: float
    done: float
    status: int
    node: str
    refusals: tuple[Told, ...] = ()
    wrong: bool = False

    @property
    def total_s(self) -> float:
        return self.done - self.intended

    @property
    def first_s(self) -> float:
        return self.first - self.intended


class Patience(msgspec.Struct, frozen=True):
    """``retries`` after a 429 or 503 that says when. A tenth of the wait is added at random, so that not all come at
    once. ``resends`` after a connection that broke or an engine that failed, a moment later and to the next gateway.
    ``timeout_s`` is each try's; 0 leaves it to the gateway.
    """

    retries: int = 1_000_000
    jitter: float = 0.1
    resends: int = 0
    timeout_s: float = 0.0


class Client:
    """Sends asks to the gateways of a world in turn."""

    def __init__(self, world: World, patience: Patience = Patience()) -> None:  # noqa: B008 - frozen
        self._world = world
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._sent = 0
        self._begun = self._loop.time()

    async def run_open(self, asks: list[Ask]) -> list[Result]:
        """Each ask at its intended time, whatever the others do"""
        self._begun = self._loop.time()
        tasks = []
        for ask in asks:
            delay = self._begun + ask.at - self._loop.time()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(self._loop.create_task(self.one(ask, self._begun + ask.at)))
        return [await task for task in tasks]

    async def run_closed(self, asks: list[Ask], concurrency: int) -> list[Result]:
        """``concurrency`` under way at any time: an ask's intended time is when its turn comes."""
        self._begun = self._loop.time()
        source = iter(asks)
        results: list[Result] = []

        async def worker() -> None:
            results.extend([await self.one(ask, self._loop.time()) for ask in source])

        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return results

    async def one(
        self, ask: Ask, intended: float, on_token: Callable[[], None] | None = None, give_up_s: float = math.inf
    ) -> Result:
        """One ask with its retries; after ``give_up_s`` the client goes away, and the status is 499."""
        refused: list[tuple[float, float]] = []
        answer = Answer(None)
        resends = self._patience.resends
        try:
            async with asyncio.timeout(None if give_up_s == math.inf else give_up_s):
                while True:
                    answer = await self._send(ask, on_token)
                    if answer.status in (429, 503) and answer.retry_after_s and len(refused) < self._patience.retries:
                        refused.append((self._loop.time(), answer.retry_after_s))
                        spread = 1.0 + self._patience.jitter * self._world.chance.random()
                        await asyncio.sleep(answer.retry_after_s * spread)
                    elif answer.status in (0, 502) and resends:
                        resends -= 1
                        await asyncio.sleep(_RESEND_S)
                    else:
                        break
            status = answer.status
        except TimeoutError:
            status = 499
        served = status == 200
        told = tuple(Told(said, answer.first_token - at) for at, said in refused) if served else ()
        return Result(
            asked=ask,
            intended=intended - self._begun,
            first=answer.first_token - self._begun,
            done=self._loop.time() - self._begun,
            status=status,
            node=answer.node,
            refusals=told,
            wrong=served and self._world.wrong(ask.model, answer),
        )

    async def _send(self, ask: Ask, on_token: Callable[[], None] | None) -> Answer:
        self._sent += 1
        gateway = self._world.gateways[self._sent % len(self._world.gateways)]
        headers, body = completion(
            ask.model,
            prompt_tokens=ask.prompt,
            max_tokens=ask.tokens,
            request=f"r-{self._sent}",
            stream=ask.stream,
            timeout_s=self._patience.timeout_s,
        )
        return await gateway.ask(headers, body, on_token)
