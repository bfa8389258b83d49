"""Whose turn it is, by the time that each has had: deficits in measured seconds. Pure but for ``Turns``, the lock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager


class Shares:
    """The seconds that each name has had, as far as they count.

    Who comes back after a pause starts level with the one that is furthest behind: time that wasn't asked for is not
    saved up. Names that have nothing to do are forgotten once all others have caught up with them.
    """

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._level = 0.0

    def pick(self, names: Iterable[str]) -> str:
        """The name that has had the least; the first of several. ``names`` are those that want a turn, and not none."""
        chosen = min(names, key=self._of)
        self._level = max(self._level, self._of(chosen))
        self._used = {name: used for name, used in self._used.items() if used > self._level}
        return chosen

    def charge(self, name: str, seconds: float) -> None:
        """``name`` has had ``seconds``."""
        self._used[name] = self._of(name) + seconds

    def _of(self, name: str) -> float:
        return max(self._used.get(name, 0.0), self._level)


class Turns:
    """A lock that goes, of those who wait, to the name that has held it least."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shares = Shares()
        self._held = False
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Hold the lock; the time of it is ``name``'s."""
        if self._held:
            await self._wait(name)
        self._held = True
        began = self._clock()
        try:
            yield
        finally:
            self._shares.charge(name, self._clock() - began)
            self._pass_on()

    async def _wait(self, name: str) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._pass_on()
            else:
                self._leave(name, mine)
            raise

    def _leave(self, name: str, mine: asyncio.Future[None]) -> None:
        queue = self._waiting[name]
        queue.remove(mine)
        if not queue:
            del self._waiting[name]

    def _pass_on(self) -> None:
        """To the next, who holds it from this moment on; ``_held`` stays as it is meanwhile."""
        if not self._waiting:
            self._held = False
            return
        name = self._shares.pick(self._waiting)
        chosen = self._waiting[name][0]
        self._leave(name, chosen)
        chosen.set_result(None)
