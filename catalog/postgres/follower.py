"""The follower: what was appended to the journal, applied to this host's view as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from wire.events import Event
from wire.outcomes import JournalUnavailable, RoostError, StorageFull

from . import journal
from .connection import TROUBLE, Connection, connect, said
from .local_view import LocalView
from .schema import CHANNEL

_log = logging.getLogger(__name__)

# a notification wakes it; this is for those that get lost
_POLL_S = 0.5
_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 2.0


class Follower:
    """Fills ``view`` from the journal at ``url``, and comes back by itself after PostgreSQL was away.

    ``on_applied`` is called on the loop with events once they are in the view. ``on_failed`` is called, once, with
    what no waiting mends: another journal than the view's, or a view that can't be written.
    """

    def __init__(
        self,
        url: str,
        view: LocalView,
        *,
        on_applied: Callable[[Sequence[Event]], object],
        on_failed: Callable[[Exception], object],
    ) -> None:
        self._url = url
        self._view = view
        self._on_applied = on_applied
        self._on_failed = on_failed
        self._position = view.position()
        self._retry_s = _RETRY_FIRST_S
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="follower")

    async def run(self) -> None:
        """Until cancelled, or failed."""
        try:
            while True:
                try:
                    await self._follow()
                except StorageFull as error:
                    self._tell(error)
                except RoostError:
                    raise
                except TROUBLE as error:
                    self._tell(error)
                await asyncio.sleep(self._retry_s)
                self._retry_s = min(self._retry_s * 2, _RETRY_MAX_S)
        except Exception as error:
            self._on_failed(error)
        finally:
            self._thread.shutdown()

    def _tell(self, error: Exception) -> None:
        _log.warning("following the journal stopped at event %d: %s", self._position, said(error))

    async def _follow(self) -> None:
        connection = await connect(self._url)
        try:
            woken = asyncio.Event()
            connection.add_termination_listener(lambda _: woken.set())
            await connection.add_listener(CHANNEL, lambda *_: woken.set())
            await self._check_same_journal(connection)
            self._retry_s = _RETRY_FIRST_S
            while True:
                woken.clear()
                await self._catch_up(connection)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await woken.wait()
        finally:
            connection.terminate()

    async def _catch_up(self, connection: Connection) -> None:
        """Apply page after page; the next one is read while one is applied."""
        page = await journal.events_after(connection, self._position)
        while page:
            applying = asyncio.get_running_loop().run_in_executor(self._thread, self._apply, page)
            try:
                following = await journal.events_after(connection, page[-1][0])
            finally:
                events = await applying
                self._position = events[-1].seq
                self._on_applied(events)
            page = following

    def _apply(self, page: Sequence[tuple[int, bytes]]) -> list[Event]:
        events = journal.decode(page)
        self._view.apply(events)
        return events

    async def _check_same_journal(self, connection: Connection) -> None:
        """The last event of the view must be the journal's too. Raises JournalUnavailable."""
        if not self._position:
            return
        ours = self._view.event(self._position)
        theirs = await journal.event_at(connection, self._position)
        # a view whose own journal was compacted has nothing to compare
        if theirs is None or ours not in (None, theirs):
            raise JournalUnavailable(
                f"event {self._position} of this host's view is not in PostgreSQL: the view is of another journal. "
                "Remove the catalog folder of this host, and it is filled anew"
            )
