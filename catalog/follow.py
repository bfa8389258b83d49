"""Following the journal as it grows: the feed, and the journal itself for what the feed lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from wire.events import Event
from wire.outcomes import RoostError
from wire.registrar import ReadJournal
from wire.sockets import FeedSubscriber

from .client import RegistrarClient
from .settings import CurveSettings

_log = logging.getLogger(__name__)

_RETRY_S = 0.5


class JournalFollower:
    """Calls ``on_event`` with every event above ``after``, each once and in order, whatever the feed loses.

    ``position`` is the last event delivered. Made and used on one event loop. An ``on_event`` that raises has had its
    event; the error is logged.
    """

    def __init__(
        self,
        feed_endpoint: str,
        client: RegistrarClient,
        on_event: Callable[[Event], None],
        *,
        after: int,
        curve: CurveSettings | None = None,
        server_public: str = "",
    ) -> None:
        self.position = after
        self._client = client
        self._on_event = on_event
        self._newest = after
        self._repair: asyncio.Task[None] | None = None
        self._feed: FeedSubscriber[Event] = FeedSubscriber(
            feed_endpoint,
            Event,
            on_message=self._on_message,
            on_gap=lambda expected, got: self._start_repair(),
            curve=curve,
            server_public=server_public,
        )

    def close(self) -> None:
        self._feed.close()
        if self._repair is not None:
            self._repair.cancel()

    def _on_message(self, number: int, event: Event) -> None:
        self._newest = max(self._newest, event.seq)
        # while a repair runs it delivers this event too, in its turn
        if self._repair is None and event.seq == self.position + 1:
            self._deliver(event)
        elif event.seq > self.position:
            self._start_repair()

    def _start_repair(self) -> None:
        if self._repair is None:
            self._repair = asyncio.get_running_loop().create_task(self._catch_up())
            self._repair.add_done_callback(self._on_repaired)

    def _on_repaired(self, task: asyncio.Task[None]) -> None:
        self._repair = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("following the journal failed at event %d", self.position, exc_info=error)
            self._start_repair()

    async def _catch_up(self) -> None:
        """Read the journal until nothing is known to be missing."""
        last = None
        while last is None or self.position < max(last, self._newest):
            try:
                found = await self._client.run(ReadJournal(after=self.position))
            except RoostError as error:
                _log.warning("events after %d can't be read yet: %s", self.position, error.message)
                await asyncio.sleep(_RETRY_S)
                continue
            last = found.last
            if last < self.position:
                _log.warning("the journal ends at %d: it was replaced by an older one than %d", last, self.position)
                self.position = self._newest = last
            for event in found.events:
                self._deliver(event)

    def _deliver(self, event: Event) -> None:
        self.position = event.seq
        self._on_event(event)
