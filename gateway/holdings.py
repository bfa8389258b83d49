"""What the nodes hold, and telling the registrar of it, so that retention and clean-up leave it alone."""

from __future__ import annotations

import asyncio
import logging

from catalog.client import RegistrarClient
from wire.outcomes import RoostError
from wire.registrar import ReportInUse

from .nodes import NodeTable

_log = logging.getLogger(__name__)

_EVERY_S = 30.0


def held_digests(nodes: NodeTable) -> list[str]:
    """The digests that any node has or is about to have, as far as it was heard last."""
    serving = (name for node in nodes for engine in node.engines.values() for name in engine.serving)
    in_slots = {digest for name in serving if (digest := name.partition("@")[2])}
    return sorted(in_slots.union(*(node.resident for node in nodes)))


class InUseReports:
    """Reports now and then. A registrar that is away hears it the next time: it forgets nothing in the meantime."""

    def __init__(
        self, registrar: RegistrarClient, nodes: NodeTable, *, gateway: str, every_s: float = _EVERY_S
    ) -> None:
        self._registrar = registrar
        self._nodes = nodes
        self._gateway = gateway
        self._every_s = every_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._registrar.run(ReportInUse(gateway=self._gateway, digests=tuple(held_digests(self._nodes))))
            except RoostError as error:
                _log.warning("the registrar was not told what is in use: %s", error.message)
