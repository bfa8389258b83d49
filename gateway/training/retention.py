"""The revisions that sampling sessions are bound to are kept from being retired, for as long as the sessions are used.

A session is used until its client finishes, or ``idle_s`` after its last sample. What is kept is a training record of
the policy in the catalog, a rollout's, under the sampling session's name. The catalog may be away while that changes:
what it was told last is brought up to what is wanted, one session at a time, until it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from wire.outcomes import JournalUnavailable, RoostError, StorageFull

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
        # the sessions in use, what each is bound to, and when it was used last
        self._wanted: dict[str, SamplerRecord] = {}
        self._used: dict[str, float] = {}
        # what the catalog is known to keep for each
        self._kept: dict[str, SamplerRecord] = {}
        self._settling: dict[str, asyncio.Task[bool]] = {}

    def go_on(self) -> None:
        """Sessions of an earlier life hold what they held, unless their clients have finished."""
        for sampler in self._journal.held():
            session = self._journal.session(sampler.session_id)
            if session is not None and not session.finished:
                self._want(sampler)

    def bound(self, sampler: SamplerRecord) -> None:
        """The session uses its revision from now on, and none that it used before. Returns at once."""
        if sampler.policy:
            self._want(sampler)
            self._settle(sampler.sampler_id, _SOON_S)

    def used(self, sampler: SamplerRecord) -> None:
        """It is asked for a sample."""
        if sampler.sampler_id in self._wanted:
            self._used[sampler.sampler_id] = self._now()
        else:
            self.bound(sampler)

    def using(self, path: str) -> SamplerRecord | None:
        """A sampling session in use that was opened on what ``path`` names."""
        return next((sampler for sampler in self._wanted.values() if sampler.path == path), None)

    def finished(self, session_id: str) -> None:
        """The client of these sessions is done."""
        for sampler in [each for each in self._wanted.values() if each.session_id == session_id]:
            self._unwant(sampler.sampler_id)
        for sampler in [each for each in self._journal.held() if each.session_id == session_id]:
            self._settle(sampler.sampler_id)

    async def sweep(self) -> None:
        """Let go of what nobody has used for long, and catch up with what the catalog could not be told."""
        limit = self._now() - self._idle_s
        for name in [name for name, used in self._used.items() if used <= limit]:
            self._unwant(name)
        held = {sampler.sampler_id for sampler in self._journal.held()}
        for name in sorted(held | self._wanted.keys()):
            wanted = self._wanted.get(name)
            if (wanted is None or wanted != self._kept.get(name)) and not await self._settle(name):
                return

    async def stop(self) -> None:
        """What is not done is done by a later life."""
        tasks = list(self._settling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _want(self, sampler: SamplerRecord) -> None:
        self._wanted[sampler.sampler_id] = sampler
        self._used[sampler.sampler_id] = self._now()

    def _unwant(self, name: str) -> None:
        self._wanted.pop(name, None)
        self._used.pop(name, None)

    def _settle(self, name: str, after_s: float = 0.0) -> asyncio.Task[bool]:
        """The one task that has the catalog keep what is wanted for the session ``name``: whether it could."""
        task = self._settling.get(name)
        if task is None:
            task = self._settling[name] = asyncio.create_task(self._settled(name, after_s))
        return task

    async def _settled(self, name: str, after_s: float) -> bool:
        try:
            await asyncio.sleep(after_s)
            # what is wanted may change meanwhile
            while await self._told(name):
                pass
            return True
        except (JournalUnavailable, StorageFull) as error:
            _log.warning("what sampling session %s uses is kept, or let go, later: %s", name, error.message)
            return False
        finally:
            del self._settling[name]

    async def _told(self, name: str) -> bool:
        """Tell the catalog what it does not know; whether there was anything. Raises JournalUnavailable."""
        wanted, kept = self._wanted.get(name), self._kept.get(name)
        if wanted is None:
            return await self._let_go(name, kept)
        if wanted == kept:
            return False
        try:
            await self._journal.hold(name)
            await self._publisher.retain_for(wanted)
            self._kept[name] = wanted
        except (JournalUnavailable, StorageFull):
            raise
        except RoostError as error:
            _log.warning("what sampling session %s uses can't be kept: %s", name, error.message)
            if self._wanted.get(name) == wanted:
                self._unwant(name)
        return True

    async def _let_go(self, name: str, kept: SamplerRecord | None) -> bool:
        sampler = kept or self._journal.holder(name)
        if sampler is None:
            return False
        await self._publisher.release_for(sampler)
        self._kept.pop(name, None)
        await self._journal.let_go(name)
        return True
