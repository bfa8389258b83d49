"""Tells the gateways what changed: soon, in few messages, and everything now and then."""

from __future__ import annotations

import asyncio

from wire.node import NodeReport, ReportOfNode
from wire.sockets import FeedPublisher

from .report import delta_report, full_report
from .state import Changes, NodeState

# residency decides where requests go, so it is told almost at once; counts of leases change with every request
_SOON_S = 0.02
_LATER_S = 0.25


class Reporter:
    """Publishes deltas of what the state has noted as changed, coalesced, and full state every ``full_every_s``."""

    def __init__(self, state: NodeState, feed: FeedPublisher[ReportOfNode], *, full_every_s: float) -> None:
        self._state = state
        self._feed = feed
        self._full_every_s = full_every_s
        self._loop = asyncio.get_running_loop()
        self._delta_at = 0.0
        self._delta: asyncio.TimerHandle | None = None
        self._full = self._loop.call_soon(self._publish_full)

    def notice(self) -> None:
        """Something may have changed: see to it that it is told."""
        changes = self._state.changes
        if changes:
            self._tell_in(_SOON_S)
        elif changes.counts:
            self._tell_in(_LATER_S)

    def report(self) -> NodeReport:
        """Full state, after what was not told yet has been: no message up to its number is newer than it."""
        self._publish_delta()
        return full_report(self._state, epoch=self._feed.epoch, number=self._feed.number)

    def close(self) -> None:
        self._full.cancel()
        if self._delta is not None:
            self._delta.cancel()

    def _tell_in(self, seconds: float) -> None:
        at = self._loop.time() + seconds
        if self._delta is not None:
            if self._delta_at <= at:
                return
            self._delta.cancel()
        self._delta_at = at
        self._delta = self._loop.call_at(at, self._publish_delta)

    def _publish_delta(self) -> None:
        if self._delta is not None:
            self._delta.cancel()
            self._delta = None
        changes = self._state.changes
        if changes or changes.counts:
            self._state.changes = Changes()
            self._feed.publish(delta_report(self._state, changes))

    def _publish_full(self) -> None:
        self._full = self._loop.call_later(self._full_every_s, self._publish_full)
        self._publish_delta()
        self._feed.publish(full_report(self._state, epoch=self._feed.epoch, number=self._feed.number + 1))
