"""Further copies of busy policies, loaded while their requests go on where they serve already."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable

from wire.outcomes import RoostError

from .leases import LeaseDesk, TryElsewhere
from .nodes import Node
from .resolve import Target

_log = logging.getLogger(__name__)

# a node that made no copy of an adapter is not asked for one again before
_PAUSE_S = 30.0
# (node, adapter) pairs that are remembered without need
_REMEMBERED = 1024


class Copies:
    """Asks nodes for copies, each at most ``timeout_s`` long; no request waits for one, or fails with it."""

    def __init__(self, leases: LeaseDesk, timeout_s: float) -> None:
        self._leases = leases
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        # until when a node is not asked: for ever while it makes the copy
        self._not_before: dict[tuple[str, str], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def make(self, nodes: Iterable[Node], target: Target) -> None:
        """Have the first of ``nodes`` that did not fail at it lately load ``target``."""
        now = self._loop.time()
        for node in nodes:
            pair = node.name, target.demand.adapter
            if self._not_before.get(pair, now) <= now:
                self._not_before[pair] = math.inf
                task = self._loop.create_task(self._make(node, target))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return

    async def _make(self, node: Node, target: Target) -> None:
        pair = node.name, target.demand.adapter
        try:
            lease = await self._leases.acquire(
                node, target.demand, size=target.size, timeout_s=self._timeout_s, use_s=0.0
            )
        except (TryElsewhere, RoostError) as error:
            _log.warning("node %s made no further copy of %s: %s", node.name, target.shown, error)
            self._not_before[pair] = self._loop.time() + _PAUSE_S
            self._forget()
        else:
            lease.release()
            del self._not_before[pair]

    def _forget(self) -> None:
        if len(self._not_before) > _REMEMBERED:
            now = self._loop.time()
            self._not_before = {pair: until for pair, until in self._not_before.items() if until > now}
