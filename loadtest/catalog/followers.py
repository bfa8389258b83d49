"""How fast a follower applies the journal in PostgreSQL, and how far it lags behind while another host writes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import uvloop

from catalog.client import RegistrarClient
from catalog.follow import JournalFollower
from catalog.postgres import journal
from catalog.postgres.connection import connect
from catalog.postgres.rows import KnownRows
from wire.events import AnyEvent, ArtifactFacts, BaseAdded, Event, PolicyCreated, RevisionPublished
from wire.registrar import AddBase, AwaitPosition, CreatePolicy

from ..postgres import running_server
from ..report import percentile
from .filled import BASE, FINGERPRINT
from .registrar import RegistrarProcess

RATE_PER_S = 500
_BATCH = 5_000


def measure(folder: Path, *, small: bool) -> dict[str, Any]:
    """Catch-up of a fresh host, in events a second, each round; and the lag of another, in milliseconds, each event.

    A lag is counted from the time in the event, which PostgreSQL gave it within the transaction that committed it.
    """
    with running_server() as server:
        caught_up = uvloop.run(_catch_up(folder, server.database(), 50_000 if small else 300_000, 3))
        lag_ms = uvloop.run(_lag(folder, server.database(), 20.0 if small else 60.0))
    return {"events_per_s": caught_up, "lag_ms": lag_ms, "rate_per_s": RATE_PER_S}


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    """The figures that were measured."""
    return {
        "follower_events_per_s": sorted(samples["events_per_s"])[len(samples["events_per_s"]) // 2],
        "follower_lag_p99_ms": round(percentile(samples["lag_ms"], 0.99), 2),
    }


async def _catch_up(folder: Path, url: str, events: int, rounds: int) -> list[float]:
    await _fill(url, events)
    rates = []
    for number in range(rounds):
        with RegistrarProcess(folder / f"late{number}", journal=url) as registrar:
            begun = time.perf_counter()
            with closing(RegistrarClient(registrar.endpoint)) as client:
                await client.run(AwaitPosition(seq=events, timeout_s=300.0), timeout_s=300.0)
            rates.append(round(events / (time.perf_counter() - begun), 1))
    return rates


async def _fill(url: str, count: int) -> None:
    """A journal of policies with two revisions each."""
    connection = await connect(url)
    try:
        bodies = enumerate(itertools.islice(_bodies(), count), start=1)
        while batch := [Event(seq, 1_000 + seq, "loadtest", body) for seq, body in itertools.islice(bodies, _BATCH)]:
            async with connection.transaction():
                await journal.write(connection, batch, {}, KnownRows())
    finally:
        await connection.close()


def _bodies() -> Iterator[AnyEvent]:
    yield BaseAdded(BASE, FINGERPRINT, "/models/tiny", b"{}")
    for number in itertools.count():
        policy = f"tenant-{number % 97}/policy-{number}"
        yield PolicyCreated(policy, BASE)
        for revision in (1, 2):
            facts = ArtifactFacts(
                f"{number * 2 + revision:064x}", 1 << 20, 16, ("q", "k", "v", "o"), "bf16", 240, 1 << 19
            )
            yield RevisionPublished(policy, revision, facts)


async def _lag(folder: Path, url: str, seconds: float) -> list[float]:
    lags: list[float] = []
    with (
        RegistrarProcess(folder / "writer", journal=url) as writer,
        RegistrarProcess(folder / "reader", journal=url) as reader,
        closing(RegistrarClient(writer.endpoint)) as client,
        closing(RegistrarClient(reader.endpoint)) as asked,
    ):
        await client.run(AddBase(name=BASE, fingerprint=FINGERPRINT, path="/models/tiny", config=b"{}"))
        seq = (await asked.run(AwaitPosition(seq=1))).position
        total = int(seconds * RATE_PER_S)
        complete = asyncio.Event()

        def note(event: Event) -> None:
            lags.append(time.time() * 1000 - event.at_ms)
            if len(lags) == total:
                complete.set()

        with closing(JournalFollower(reader.feed_endpoint, asked, note, after=seq)):
            await _write(client, total)
            await complete.wait()
    return [round(lag, 3) for lag in lags]


async def _write(client: RegistrarClient, total: int) -> None:
    """``total`` events, paced."""
    begun = time.perf_counter()
    asking: set[asyncio.Task[Any]] = set()
    for number in range(total):
        late = number / RATE_PER_S - (time.perf_counter() - begun)
        if late > 0:
            await asyncio.sleep(late)
        task = asyncio.create_task(client.run(CreatePolicy(policy=f"load/policy-{number}", base=BASE)))
        asking.add(task)
        task.add_done_callback(asking.discard)
    await asyncio.gather(*asking)
