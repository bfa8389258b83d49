"""Hosts that share a journal: a registrar process each, over one PostgreSQL and one store."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from catalog.checks import WriteCommand
from catalog.client import RegistrarClient
from catalog.environment import Environment
from tests.catalog.processes import RegistrarProcess
from wire.outcomes import JournalUnavailable
from wire.registrar import AwaitPosition, Committed, Reached

Row = tuple[str, bytes, bytes]


@contextmanager
def fleet(journal: str, *, hosts: int = 2) -> Iterator[list[RegistrarProcess]]:
    """Registrars that serve."""
    with tempfile.TemporaryDirectory(prefix="roost-") as name:
        registrars = []
        try:
            for number in range(hosts):
                folder = Path(name) / str(number)
                folder.mkdir()
                registrars.append(RegistrarProcess(folder, journal=journal, store=Path(name) / "store"))
                registrars[-1].start()
            yield registrars
        finally:
            for registrar in registrars:
                registrar.close()


def dump(registrar: RegistrarProcess) -> list[Row]:
    """Every row of the host's view, as it lies there."""
    environment = Environment.open(registrar.catalog_dir)
    try:
        with environment.begin() as txn:
            return [
                (name, bytes(key), bytes(raw))
                for name, table in environment.tables.named().items()
                for key, raw in txn.cursor(db=table.handle)
            ]
    finally:
        environment.close()


async def eventually_answered(
    client: RegistrarClient, command: WriteCommand | AwaitPosition, timeout_s: float = 30.0
) -> Committed | Reached:
    """The answer to a command that is asked again as long as the journal is not available."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                return await client.run(command)
            except JournalUnavailable:
                await asyncio.sleep(0.05)


class CuttingProxy:
    """Between a registrar and PostgreSQL's socket. While ``cutting``, what answers the next COMMIT never arrives; then,
    where it is ``closed``, nobody is let in any more."""

    def __init__(self, folder: Path, server: Path) -> None:
        self.folder = folder
        self.cutting = self.closed = False
        self.cuts = 0
        self._server = server / ".s.PGSQL.5432"
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> CuttingProxy:
        self._listening = await asyncio.start_unix_server(self._serve, self.folder / ".s.PGSQL.5432")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        if self.closed and self.cuts:
            to_client.close()
            return
        server, to_server = await asyncio.open_unix_connection(self._server)
        for source, sink, cut in ((client, to_server, to_client), (server, to_client, None)):
            task = asyncio.create_task(self._relay(source, sink, cut))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _relay(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, cut: asyncio.StreamWriter | None
    ) -> None:
        try:
            while data := await source.read(1 << 16):
                if cut is not None and self.cutting and b"COMMIT;" in data:
                    self.cutting = False
                    self.cuts += 1
                    cut.transport.abort()
                sink.write(data)
        except ConnectionError:
            pass
        finally:
            sink.close()
