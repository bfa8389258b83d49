"""Whose turn it is, by the time that each has had: deficits in measured seconds. Pure but for ``Turns``, the lock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

# what lies between two operations of a run that has more to do: a result made durable
GRACE_S = 0.05


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
    """A lock that goes, of those who wait, to the name that has held it least.

    A name that lets the lock go has it kept for ``grace_s`` against those who have had more: its next operation is on
    its way, and would else find somebody else's long one before it each time. The wait counts as its own.
    """

    def __init__(self, *, grace_s: float = GRACE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._shares = Shares()
        self._taken = False
        self._kept_for = ""
        self._kept_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Hold the lock; the time of it is ``name``'s."""
        if self._timer is not None and self._shares.pick([self._kept_for, name]) == name:
            self._timer.cancel()
            self._end_keeping()
        elif self._taken:
            await self._wait(name)
        self._taken = True
        began = self._clock()
        try:
            yield
        finally:
            self._shares.charge(name, self._clock() - began)
            self._let_go(name)

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

    def _let_go(self, name: str) -> None:
        if name in self._waiting or self._shares.pick([*self._waiting, name]) != name:
            self._pass_on()
            return
        self._kept_for, self._kept_since = name, self._clock()
        self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._keep_no_longer)

    def _keep_no_longer(self) -> None:
        self._end_keeping()
        self._pass_on()

    def _end_keeping(self) -> None:
        self._timer = None
        self._shares.charge(self._kept_for, self._clock() - self._kept_since)

    def _pass_on(self) -> None:
        """To the next, whose lock it is from this moment on."""
        if not self._waiting:
            self._taken = False
            return
        name = self._shares.pick(self._waiting)
        chosen = self._waiting[name][0]
        self._leave(name, chosen)
        chosen.set_result(None)
