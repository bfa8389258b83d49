"""Killed at random points of a mixed load: what was acknowledged is there, once, and the view is the journal's."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from catalog.replay import check_catalog
from catalog.view import CatalogView
from loadtest.postgres import PostgresServer
from tests.catalog.harness import add_base
from tests.catalog.mixed_load import Writer
from tests.catalog.postgres.fleet import dump, eventually_answered, fleet
from tests.catalog.processes import RegistrarProcess, eventually
from wire.registrar import AwaitPosition, Committed

KILLS = 20
KILLS_OF_A_SOAK = 300
WRITERS = 6


async def under_load(
    registrars: list[RegistrarProcess], kills: int, kill: Callable[[int], Awaitable[None]], *, ids: bool
) -> None:
    """``kill(number)`` ends something and has it back; then everything is looked at."""
    client = registrars[0].client()
    await client.run(add_base())
    client.close()
    writers = [Writer(f"w{number}", registrars[0].store, ids=ids) for number in range(WRITERS)]
    chance = random.Random(kills)
    for number in range(kills):
        loads = [
            asyncio.ensure_future(load(writer, registrars[index % len(registrars)]))
            for index, writer in enumerate(writers)
        ]
        enough = sum(writer.acknowledged for writer in writers) + chance.randrange(1, 40)
        await eventually(lambda: sum(w.acknowledged for w in writers) >= enough, 60.0)  # noqa: B023
        await asyncio.sleep(chance.random() * 0.02)
        await kill(number)
        for running in loads:
            running.cancel()
        for ended in await asyncio.gather(*loads, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended
        await look_at(registrars, writers)


async def load(writer: Writer, registrar: RegistrarProcess) -> None:
    """Until it is cancelled, which may be in the middle of a command."""
    while True:
        await writer.run(registrar.client)
        await asyncio.sleep(0.01)


async def look_at(registrars: list[RegistrarProcess], writers: list[Writer]) -> None:
    clients = [registrar.client() for registrar in registrars]
    # a command that changes nothing waits for those that nobody waits for any more
    fences = [await eventually_answered(client, add_base()) for client in clients]
    newest = max(fence.seq for fence in fences if isinstance(fence, Committed))
    assert newest >= max(writer.last_seq for writer in writers)
    for client, registrar in zip(clients, registrars, strict=True):
        await eventually_answered(client, AwaitPosition(seq=newest))
        client.close()
        view = CatalogView.open(registrar.catalog_dir)
        for writer in writers:
            writer.check(view)
        view.close()
        assert check_catalog(registrar.catalog_dir).differences == ()


async def one_host(kills: int) -> None:
    with tempfile.TemporaryDirectory(prefix="roost-") as folder:
        registrar = RegistrarProcess(Path(folder))
        registrar.start()

        async def kill(number: int) -> None:
            registrar.kill()
            await asyncio.to_thread(registrar.start)

        try:
            await under_load([registrar], kills, kill, ids=False)
        finally:
            registrar.close()


async def two_hosts(server: PostgresServer, kills: int) -> None:
    with fleet(server.database()) as registrars:

        async def kill(number: int) -> None:
            """Each of a registrar, the other one, a backend and the postmaster in turn."""
            victim = number % 4
            if victim < 2:
                registrars[victim].kill()
                await asyncio.to_thread(registrars[victim].start)
            elif victim == 2:
                await asyncio.to_thread(server.kill_a_backend)
            else:
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)

        await under_load(registrars, kills, kill, ids=True)
        assert dump(registrars[0]) == dump(registrars[1])


async def test_killing_a_host_alone_loses_nothing_and_repeats_nothing() -> None:
    await one_host(KILLS)


async def test_killing_registrars_backends_and_postgres_loses_nothing_and_repeats_nothing(
    own_postgres: PostgresServer,
) -> None:
    await two_hosts(own_postgres, KILLS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_killing_a_host_alone_many_times() -> None:
    await one_host(KILLS_OF_A_SOAK)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_killing_registrars_backends_and_postgres_many_times(own_postgres: PostgresServer) -> None:
    await two_hosts(own_postgres, KILLS_OF_A_SOAK)
