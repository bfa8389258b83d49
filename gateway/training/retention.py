"""The revisions that sampling sessions are bound to are kept from being retired, for as long as the sessions are used.

A session is used until its client finishes, or ``idle_s`` after its last sample. What is kept is a training record of
the policy in the catalog, a rollout's, under the sampling session's name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine

from wire.outcomes import RoostError

from .journal import Journal
from .publishing import Publisher
from .records import SamplerRecord

_log = logging.getLogger(__name__)

# the channel latest keeps a new revision for now: this need not be in the way of who waits for its first token
_SOON_S = 0.5


class Retention:
    """Made and used on one event loop; ``now`` is a monotonic clock in seconds."""

    def __init__(
        self, journal: Journal, publisher: Publisher, *, idle_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._journal = journal
        self._publisher = publisher
        self._idle_s = idle_s
        self._now = now
        # when each session that holds a revision was used last
        self._used: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def go_on(self) -> None:
        """Sessions of an earlier life hold what they held."""
        for sampler in self._journal.held():
            self._used[sampler.sampler_id] = self._now()

    def bound(self, sampler: SamplerRecord) -> None:
        """The session uses its revision from now on, and none that it used before. Returns at once."""
        if sampler.policy:
            self._used[sampler.sampler_id] = self._now()
            self._start(self._retain(sampler))

    def used(self, sampler: SamplerRecord) -> None:
        """It is asked for a sample."""
        if sampler.sampler_id in self._used:
            self._used[sampler.sampler_id] = self._now()
        else:
            self.bound(sampler)

    def finished(self, session_id: str) -> None:
        """The client of these sessions is done."""
        for sampler_id in [each for each in self._used if each.partition(":")[0] == session_id]:
            del self._used[sampler_id]
        self._start(self._release([each for each in self._journal.held() if each.session_id == session_id]))

    async def sweep(self) -> None:
        """Let go of what nobody has used for long."""
        limit = self._now() - self._idle_s
        await self._release([each for each in self._journal.held() if self._used.get(each.sampler_id, 0.0) <= limit])

    async def stop(self) -> None:
        """What is not done is done by a later sample or sweep."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _retain(self, sampler: SamplerRecord) -> None:
        await asyncio.sleep(_SOON_S)
        if sampler.sampler_id not in self._used:
            return
        await self._journal.hold(sampler.sampler_id)
        await self._publisher.retain_for(sampler)

    async def _release(self, samplers: list[SamplerRecord]) -> None:
        for sampler in samplers:
            self._used.pop(sampler.sampler_id, None)
            await self._publisher.release_for(sampler)
            await self._journal.let_go(sampler.sampler_id)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(self._told(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _told(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except RoostError as error:
            _log.warning("what a sampling session uses could not be kept, or let go: %s", error.message)
