"""Who waits for this host's view to reach a position of the journal."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple

Then = Callable[[], object]

# places of those who gave up that are not worth tidying away
_TIDY_FROM = 64


class _Waiter(NamedTuple):
    then: Then
    otherwise: Then
    timer: asyncio.TimerHandle


class Positions:
    """How far the view is, and what to do once it is further. Made and used on one event loop."""

    def __init__(self, reached: int) -> None:
        self.reached = reached
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._waiters: dict[int, _Waiter] = {}
        # by sequence number; of those who gave up a bounded number is still in it, and skipped when their turn comes
        self._turns: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiters)

    @property
    def places(self) -> int:
        """How many have a place in memory: at most twice as many as wait, and a few."""
        return len(self._turns)

    def when(self, seq: int, then: Then, *, timeout_s: float, otherwise: Then) -> None:
        """Call ``then`` once ``seq`` is reached, now if it is; after ``timeout_s`` seconds ``otherwise`` instead."""
        if seq <= self.reached:
            then()
            return
        number = next(self._numbers)
        timer = self._loop.call_later(timeout_s, self._give_up, number)
        self._waiters[number] = _Waiter(then, otherwise, timer)
        heapq.heappush(self._turns, (seq, number))

    def reach(self, seq: int) -> None:
        """The view has every event up to ``seq``."""
        self.reached = max(self.reached, seq)
        while self._turns and self._turns[0][0] <= self.reached:
            _, number = heapq.heappop(self._turns)
            if waiter := self._waiters.pop(number, None):
                waiter.timer.cancel()
                waiter.then()

    def give_up(self) -> None:
        """Nothing more will be reached: everybody's time is over."""
        for number in list(self._waiters):
            self._give_up(number)

    def _give_up(self, number: int) -> None:
        waiter = self._waiters.pop(number)
        waiter.timer.cancel()
        if len(self._turns) > 2 * len(self._waiters) + _TIDY_FROM:
            self._turns = [turn for turn in self._turns if turn[1] in self._waiters]
            heapq.heapify(self._turns)
        waiter.otherwise()
