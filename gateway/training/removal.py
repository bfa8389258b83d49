"""What was saved goes: when its time is over, or when its owner says so.

A removal is a mark in the journal first, from which on nobody sees what was saved; then the catalog's record goes, and
the bytes. A life that ends in between leaves the mark, and the next one goes on from it. The revision that sampler
weights name stays its policy's: its retention retires it, and other names may name it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time

from wire.outcomes import InvalidRequest, JournalUnavailable, StorageFull

from .journal import Journal
from .publishing import Publisher
from .records import SavedRecord
from .retention import Retention

_log = logging.getLogger(__name__)

# how long a removal that is asked for again is known to be done: SDKs repeat what was not answered for minutes
_REMEMBERED_MS = 3_600_000


class Removal:
    """Made and used on one event loop."""

    def __init__(self, journal: Journal, publisher: Publisher, retention: Retention) -> None:
        self._journal = journal
        self._publisher = publisher
        self._retention = retention
        # by run, the checkpoint that it writes until its result is recorded: nobody removes that meanwhile
        self._saving: dict[str, str] = {}
        self._removing = asyncio.Lock()

    async def saving(self, model_id: str, path: str) -> None:
        """The run writes the checkpoint ``path`` from now on, until ``recorded``."""
        async with self._removing:
            self._saving[model_id] = path

    def recorded(self, model_id: str) -> None:
        """What the run's last operation came to is in the journal."""
        self._saving.pop(model_id, None)

    async def remove(self, path: str) -> None:
        """Remove what ``path`` names; removed already, nothing happens. What can't go now goes by ``expire``.

        Raises NotFound, and InvalidRequest for what is in use.
        """
        sampler = self._retention.using(path)
        if sampler is not None:
            raise InvalidRequest(f"{path} is in use: {sampler.sampler_id} samples from it", field="path")
        async with self._removing:
            removed = await self._journal.remove_saved(path)
            if path in self._saving.values():
                return
            try:
                await self._clear(removed)
            except (JournalUnavailable, StorageFull) as error:
                _log.warning("the rest of %s is removed later: %s", path, error.message)

    async def keep_for(self, path: str, ttl_s: int) -> None:
        """What ``path`` names expires ``ttl_s`` from now (0: never). Raises NotFound."""
        async with self._removing:
            await self._journal.keep_until(path, time.time_ns() // 1_000_000 + ttl_s * 1000 if ttl_s else 0)

    async def expire(self, now_ms: int) -> None:
        """Remove what has had its time, and what is left of removals. What is being written anew is left alone.

        Raises JournalUnavailable where the catalog can't be told: what has not been removed is there until it can be.
        """
        async with self._removing:
            anew = set(self._saving.values())
            for saved in self._journal.due(now_ms):
                # a run may have begun to load it meanwhile, and then it stays
                with contextlib.suppress(InvalidRequest):
                    if saved.path not in anew:
                        await self._clear(saved)
            await self._journal.forget_removed(now_ms - _REMEMBERED_MS)

    async def _clear(self, saved: SavedRecord) -> None:
        """The catalog's record, then the mark where there is none yet, the bytes last."""
        if saved.folder:
            await self._publisher.release(saved)
        if not saved.removed_ms:
            saved = await self._journal.remove_saved(saved.path)
        if saved.folder:
            await asyncio.to_thread(shutil.rmtree, saved.folder, ignore_errors=True)
            await self._journal.bytes_removed(saved)
