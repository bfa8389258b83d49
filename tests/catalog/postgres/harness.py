"""A catalog whose journal lies in PostgreSQL, without sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

from catalog.batch import Batch, BatchCommand
from catalog.blobs import BlobStore
from catalog.environment import Environment
from catalog.postgres import journal
from catalog.postgres.connection import connect
from catalog.postgres.ledger import PostgresLedger
from catalog.postgres.local_view import LocalView
from catalog.view import CatalogView
from tests.catalog.harness import Catalog


class FollowedLedger(PostgresLedger):
    """After each batch this host's view has what was appended, as a reader of the tests expects."""

    def __init__(self, url: str, store: BlobStore, view: LocalView) -> None:
        ticks = itertools.count(1_000)
        super().__init__(url, store, view, now_ms=lambda: next(ticks))

    def run(self, commands: Sequence[BatchCommand]) -> Batch:
        batch = super().run(commands)
        self._runner.run(self._follow())
        return batch

    async def _follow(self) -> None:
        connection = await self._connected()
        while page := await journal.events_after(connection, self._view.position()):
            self._view.apply(journal.decode(page))


class PostgresCatalog(Catalog):
    """The same as tests.catalog.harness.Catalog, over an emptied database."""

    def __init__(self, folder: Path, url: str) -> None:
        asyncio.run(emptied(url))
        self.environment = Environment.create(folder / "catalog", map_bytes=1 << 26)
        self.store = BlobStore(folder / "store")
        self.ledger = FollowedLedger(url, self.store, LocalView(self.environment))
        self.view = CatalogView(self.environment)

    def close(self) -> None:
        self.ledger.close()
        super().close()


async def emptied(url: str) -> None:
    """Our schema with nothing in it."""
    connection = await connect(url)
    try:
        await connection.execute("TRUNCATE roost.journal, roost.records, roost.commands, roost.sweeping")
    finally:
        await connection.close()
