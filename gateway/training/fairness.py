"""Whose turn it is, by the time that each has had: deficits in measured seconds. Pure but for ``Turns``, the lock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from enum import IntEnum

# what lies between two operations of a run that has more to do: a result made durable
GRACE_S = 0.05
# the same where that operation is known to be there: it comes as fast as the disk allows
SURE_GRACE_S = 1.0


class Stage(IntEnum):
    """Where in a training step an operation lies: gradients, then the optimiser, then what is kept of the result."""

    GRADIENTS = 0
    OPTIMISER = 1
    RESULT = 2


def _nothing_more() -> bool:
    return False


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

    A name that says it has more is let finish its training step in the same way, against everybody: were its short
    optimiser's step put behind the gradients of all others, all would finish together, and their clients, who sample
    with the result, would leave the trainer idle together.
    """

    def __init__(
        self, *, grace_s: float = GRACE_S, sure_grace_s: float = SURE_GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._grace_s = grace_s
        self._sure_grace_s = sure_grace_s
        self._clock = clock
        self._shares = Shares()
        self._taken = False
        self._kept_for = ""
        self._kept_since = 0.0
        # None where it is kept against those only who have had more
        self._kept_after: Stage | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(
        self, name: str, stage: Stage = Stage.GRADIENTS, more: Callable[[], bool] = _nothing_more
    ) -> AsyncIterator[None]:
        """Hold the lock; the time of it is ``name``'s. ``more``, asked at the end: is its next operation there?"""
        if self._timer is not None and self._may_have_what_is_kept(name, stage):
            self._timer.cancel()
            self._end_keeping()
        else:
            if self._timer is not None and name == self._kept_for:
                self._timer.cancel()
                self._keep_no_longer()
            if self._taken:
                await self._wait(name)
        self._taken = True
        began = self._clock()
        try:
            yield
        finally:
            self._shares.charge(name, self._clock() - began)
            self._let_go(name, stage if more() else None)

    def _may_have_what_is_kept(self, name: str, stage: Stage) -> bool:
        if self._kept_after is None:
            return self._shares.pick([self._kept_for, name]) == name
        return name == self._kept_for and (stage > self._kept_after or self._next(name))

    def _next(self, name: str) -> bool:
        """Whether it would be ``name``'s turn among those who wait."""
        return self._shares.pick([*self._waiting, name]) == name

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

    def _let_go(self, name: str, unfinished: Stage | None) -> None:
        if unfinished is None and (name in self._waiting or not self._next(name)):
            self._pass_on()
            return
        self._kept_for, self._kept_since, self._kept_after = name, self._clock(), unfinished
        grace_s = self._grace_s if unfinished is None else self._sure_grace_s
        self._timer = asyncio.get_running_loop().call_later(grace_s, self._keep_no_longer)

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
