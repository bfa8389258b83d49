"""An event loop whose time jumps to the next thing that is due."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

# far below any delay that is modelled, and above what adding up floats over days loses
_RESOLUTION_S = 1e-7


class NothingToCome(RuntimeError):
    """Everybody waits, and nothing is due that could end it."""


class _Jumping(selectors.BaseSelector):
    """Hears of no file. Asked to wait, it moves the time on instead."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, number, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingToCome("nothing is due, and somebody waits")
        self.now += max(0.0, timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio without waiting. ``time()`` begins at 0, in seconds; threads and files can't wake it."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self._clock_resolution = _RESOLUTION_S

    def time(self) -> float:
        return self._jumping.now


def simulate(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``main()`` to its end in a loop of its own that starts at time 0. Raises NothingToCome where it can't end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
