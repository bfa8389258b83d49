"""A model of an engine: slots, continuous batching, chunked prefill, and calls that run between two steps.

One step computes a token for every running sequence and as much of the waiting prompts as its token budget takes. Calls
(install, remove) run when a step has ended, one after another; nothing is computed meanwhile. As many loads as the real
engine's own ``Pace`` allows run before the next step, the oldest first, and all removals. A removal is refused while an
unfinished request names the adapter.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from backends.interface import Removal
from backends.vllm.pace import Pace

from .constants import EngineConstants

BASE_CONTENT = "base"
DIED = "the engine died"


class Sequence:
    """One request in the engine. ``on_token(content, last)`` gets, at the end of each step, what the slot held."""

    __slots__ = ("adapter", "generated", "left", "on_failure", "on_token", "slot", "wanted")

    def __init__(
        self,
        adapter: str,
        prompt_tokens: int,
        wanted: int,
        on_token: Callable[[str, bool], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self.adapter = adapter
        self.left = max(1, prompt_tokens)
        self.wanted = max(1, wanted)
        self.generated = 0
        self.slot: int | None = None
        self.on_token = on_token
        self.on_failure = on_failure


class Call:
    """An install (with ``read``) or a removal, and who is told of its end."""

    __slots__ = ("adapter", "on_end", "read", "seconds")

    def __init__(
        self,
        adapter: str,
        seconds: float,
        read: Callable[[], str] | None,
        on_end: Callable[[Removal | str | None], None],
    ) -> None:
        self.adapter = adapter
        self.seconds = seconds
        self.read = read
        self.on_end = on_end


class EngineModel:
    """One engine on the running loop. ``busy_s`` counts the seconds that steps and calls took.

    It answers with what its slots hold, so that a slot that was written under a request shows in the answer.
    """

    def __init__(self, constants: EngineConstants, slots: int) -> None:
        self.constants = constants
        self.slots = slots
        self.installed: dict[str, int] = {}
        self.contents: dict[int, str] = {}
        self.running: dict[Sequence, None] = {}
        self.waiting: deque[Sequence] = deque()
        self.calls: deque[Call] = deque()
        self.alive = True
        self.counts: Counter[str] = Counter()
        self.busy_s = 0.0
        self._in_use: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._free = list(range(slots - 1, -1, -1))
        self._pace = Pace(self._loop.time)
        self._turn: asyncio.TimerHandle | None = None

    # requests

    def submit(self, sequence: Sequence) -> bool:
        """Schedule a request; false where its adapter is not here (never for the base)."""
        if not self.alive or (sequence.adapter and sequence.adapter not in self.installed):
            self.counts["unknown_adapter"] += 1
            return False
        if sequence.adapter:
            sequence.slot = self.installed[sequence.adapter]
            self._in_use[sequence.adapter] += 1
        self.waiting.append(sequence)
        self.counts["requests"] += 1
        self._go_on()
        return True

    def abort(self, sequence: Sequence) -> None:
        """Its client went away. Does nothing once it has ended."""
        if sequence in self.running:
            del self.running[sequence]
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return
        self._ended(sequence)
        self.counts["aborted"] += 1

    @property
    def unfinished(self) -> int:
        return len(self.running) + len(self.waiting)

    # adapters

    def install(
        self, adapter: str, seconds: float, read: Callable[[], str], on_end: Callable[[Removal | str | None], None]
    ) -> None:
        """Write an adapter into a slot. ``read()`` gives its bytes' digest when they are copied, or raises.

        ``on_end`` gets None, or why it did not happen.
        """
        self._call(Call(adapter, seconds, read, on_end))

    def remove(self, adapter: str, on_end: Callable[[Removal | str | None], None]) -> None:
        """Give a slot back; ``on_end`` gets what came of it."""
        self._call(Call(adapter, self.constants.remove_s, None, on_end))

    def die(self) -> None:
        """Everything under way fails; nothing is answered from now on."""
        self.alive = False
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        for sequence in [*self.running, *self.waiting]:
            sequence.on_failure(DIED)
        calls, self.calls = self.calls, deque()
        self.running, self.waiting = {}, deque()
        for call in calls:
            call.on_end(DIED)

    # time

    def _call(self, call: Call) -> None:
        if not self.alive:
            call.on_end(DIED)
            return
        self.calls.append(call)
        self._go_on()

    def _go_on(self) -> None:
        if self._turn is None and self.alive:
            self._begin_turn()

    def _begin_turn(self) -> None:
        """Calls that are due go before the next step."""
        call = self._due()
        if call is not None:
            self._spend(call.seconds, self._end_call, call)
        elif self.unfinished:
            prefilling, seconds = self._plan()
            self._pace.step_begins()
            self._spend(seconds, self._end_step, prefilling)
        else:
            self._turn = None

    def _due(self) -> Call | None:
        """The oldest call that need not wait for a step."""
        loads = not self.unfinished or self._pace.allows()
        return next((call for call in self.calls if loads or call.read is None), None)

    def _spend(self, seconds: float, then: Callable[..., None], *arguments: object) -> None:
        self.busy_s += seconds
        self._turn = self._loop.call_later(seconds, then, *arguments)

    def _plan(self) -> tuple[list[tuple[Sequence, int]], float]:
        """Which prompts the next step works on, and how long it takes."""
        constants = self.constants
        decoding = [sequence for sequence in self.running if not sequence.left]
        budget = constants.step_tokens - len(decoding)
        while self.waiting and len(self.running) < constants.max_batch:
            self.running[self.waiting.popleft()] = None
        prefilling: list[tuple[Sequence, int]] = []
        for sequence in self.running:
            tokens = min(sequence.left, budget)
            if tokens > 0:
                prefilling.append((sequence, tokens))
                budget -= tokens
        begun = [sequence for sequence, _ in prefilling]
        seconds = constants.step_seconds(
            sequences=len(decoding) + len(begun),
            prompt_tokens=sum(tokens for _, tokens in prefilling),
            adapters=_adapters(decoding + begun),
            prompted=_adapters(begun),
            adapter_tokens=sum(tokens for sequence, tokens in prefilling if sequence.adapter),
        )
        return prefilling, seconds

    def _end_step(self, prefilling: list[tuple[Sequence, int]]) -> None:
        self.counts["steps"] += 1
        self._pace.step_ended()
        decoding = [sequence for sequence in self.running if not sequence.left]
        for sequence, tokens in prefilling:
            sequence.left -= tokens
        computed = decoding + [sequence for sequence, _ in prefilling if not sequence.left]
        for sequence in computed:
            if sequence not in self.running:
                continue  # aborted by what another one's token led to
            sequence.generated += 1
            last = sequence.generated >= sequence.wanted
            content = BASE_CONTENT if sequence.slot is None else self.contents.get(sequence.slot, "nothing")
            if last:
                del self.running[sequence]
                self._ended(sequence)
                self.counts["finished"] += 1
            sequence.on_token(content, last)
        self._turn = None
        self._go_on()

    def _end_call(self, call: Call) -> None:
        self.calls.remove(call)
        result: Removal | str | None
        if call.read is None:
            result = self._removed(call.adapter)
        else:
            self._pace.took(call.seconds)
            result = self._installed(call.adapter, call.read)
        self._turn = None
        call.on_end(result)
        self._go_on()

    def _installed(self, adapter: str, read: Callable[[], str]) -> str | None:
        if adapter in self.installed:
            return None
        if not self._free:
            return f"no free slot: {len(self.installed)} of {self.slots} are taken"
        try:
            content = read()
        except OSError as error:
            return str(error)
        slot = self._free.pop()
        self.installed[adapter] = slot
        self.contents[slot] = content
        self.counts["installs"] += 1
        return None

    def _removed(self, adapter: str) -> Removal:
        loading = any(call.adapter == adapter and call.read is not None for call in self.calls)
        if adapter not in self.installed and not loading:
            return Removal.ABSENT
        if loading or self._in_use[adapter]:
            self.counts["busy"] += 1
            return Removal.BUSY
        slot = self.installed.pop(adapter)
        del self.contents[slot]
        self._free.append(slot)
        self.counts["removals"] += 1
        return Removal.REMOVED

    def _ended(self, sequence: Sequence) -> None:
        if sequence.adapter:
            self._in_use[sequence.adapter] -= 1
            if not self._in_use[sequence.adapter]:
                del self._in_use[sequence.adapter]


def _adapters(sequences: list[Sequence]) -> int:
    """How many different ones there are."""
    return len({sequence.adapter for sequence in sequences} - {""})
