"""A file that is still being written, copied into the artifact store behind its writer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from catalog.artifacts import ArtifactStore, ArtifactWriter
from wire.events import ArtifactFacts
from wire.outcomes import ArtifactUnavailable

_COPY_BYTES = 4 << 20


class FollowingCopy:
    """The copy of ``file``. Used on one event loop; ``close`` it, committed or not."""

    def __init__(self, store: ArtifactStore, file: Path) -> None:
        self._store = store
        self._file = file
        self._writer: ArtifactWriter | None = None
        self._final = 0
        self._copied = 0
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    def progress(self, done: int) -> None:
        """The file's first ``done`` bytes are final; fewer than before means that it was begun anew.

        A trainer goes on writing when its caller has left: nothing is copied once this is closed.
        """
        if self._closed:
            return
        self._final = done
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._follow())

    async def commit(self, facts: ArtifactFacts) -> None:
        """Have the whole file in the store, durably. Raises ArtifactUnavailable, StorageFull."""
        if await _in_thread(self._store.size, facts.digest) == facts.size:
            return
        try:
            self._final = facts.size
            if self._running is not None:
                await self._running
            await self._follow()
            await _in_thread(self._commit, facts.digest)
        except ArtifactUnavailable as error:
            if error.field != "digest":
                raise
            # the file was begun anew meanwhile, and a part of the copy is of its former life
            await self._drop()
            self._copied = 0
            await _in_thread(self._copy_whole, facts)

    async def close(self) -> None:
        """Drop what was copied, if it was not committed."""
        self._closed = True
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)
        await self._drop()

    async def _drop(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await _in_thread(writer.abort)

    async def _follow(self) -> None:
        while self._copied < self._final:
            await _in_thread(self._copy, self._final)

    def _copy(self, upto: int) -> None:
        if self._writer is None:
            self._writer = self._store.writer()
        with self._file.open("rb", buffering=0) as source:
            while self._copied < upto:
                piece = os.pread(source.fileno(), min(_COPY_BYTES, upto - self._copied), self._copied)
                if not piece:
                    raise ArtifactUnavailable("the revision's file is shorter than its writer said", field="digest")
                self._writer.write(piece)
                self._copied += len(piece)

    def _commit(self, digest: str) -> None:
        if self._writer is not None:
            self._writer.commit(digest)

    def _copy_whole(self, facts: ArtifactFacts) -> None:
        self._copy(facts.size)
        self._commit(facts.digest)


async def _in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    """Not left before ``work`` has ended, cancelled or not: two threads never have the copy at a time."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
