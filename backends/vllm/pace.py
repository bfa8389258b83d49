"""How much of an engine's time loads may take between two steps, so that they are quick and no stream waits long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# of the last step's duration: a stream's longest gap grows by this, or by one load where that takes longer
SHARE = 0.25


class Pace:
    """Between two steps loads take SHARE of the last step's time, or one of them as long as it takes.

    ``clock`` tells seconds. A load is expected to take as long as the one before it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._step_began: float | None = None
        self._step_s = 0.0
        self._spent_s = 0.0
        self._load_s = 0.0

    def step_begins(self) -> None:
        self._step_began = self._clock()

    def step_ended(self) -> None:
        """Or is taken to have: what was spent on loads since the last one counts no more."""
        if self._step_began is not None:
            self._step_s = self._clock() - self._step_began
        self._spent_s = 0.0

    def allows(self) -> bool:
        """Whether one more load may begin before the next step."""
        return not self._spent_s or self._spent_s + self._load_s <= SHARE * self._step_s

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Around a load."""
        began = self._clock()
        try:
            yield
        finally:
            self.took(self._clock() - began)

    def took(self, seconds: float) -> None:
        """A load has ended."""
        self._load_s = seconds
        self._spent_s += seconds
