"""What the nodes hold, and telling the registrar of it, so that retention and clean-up leave it alone."""

from __future__ import annotations

import asyncio
import logging

from catalog.client import RegistrarClient
from wire.outcomes import RoostError
from wire.registrar import ReportInUse

from .nodes import NodeTable
from .workers import Workers

_log = logging.getLogger(__name__)

_EVERY_S = 30.0
# far below what a message may hold
_DIGESTS_A_PART = 50_000


async def held_digests(nodes: NodeTable, workers: Workers) -> tuple[str, ...]:
    """The digests that any node has or is about to have, as far as it was heard last, in order.

    They may be a hundred thousand, so only their copies are made on the event loop, where nodes change.
    """
    serving = [name for node in nodes for engine in node.engines.values() for name in engine.serving]
    return await workers.run(_in_order, serving, [list(node.resident) for node in nodes])


def _in_order(serving: list[str], resident: list[list[str]]) -> tuple[str, ...]:
    in_slots = {digest for name in serving if (digest := name.partition("@")[2])}
    return tuple(sorted(in_slots.union(*resident)))


class InUseReports:
    """Reports now and then. A registrar that is away hears it the next time: it forgets nothing in the meantime."""

    def __init__(
        self, registrar: RegistrarClient, nodes: NodeTable, workers: Workers, *, gateway: str, every_s: float = _EVERY_S
    ) -> None:
        self._registrar = registrar
        self._nodes = nodes
        self._workers = workers
        self._gateway = gateway
        self._every_s = every_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._report()
            except RoostError as error:
                _log.warning("the registrar was not told what is in use: %s", error.message)

    async def _report(self) -> None:
        complete = all(node.heard for node in self._nodes)
        held = await held_digests(self._nodes, self._workers)
        parts = [held[place : place + _DIGESTS_A_PART] for place in range(0, len(held), _DIGESTS_A_PART)] or [()]
        for number, digests in enumerate(parts):
            await self._registrar.run(
                ReportInUse(gateway=self._gateway, digests=digests, part=number, parts=len(parts), complete=complete)
            )
