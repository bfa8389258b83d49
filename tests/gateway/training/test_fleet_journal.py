"""A journal in PostgreSQL: one process at a time has it, any host can go on with it, and no commit is in doubt."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.training import postgres as module
from gateway.training.journal import Journal
from gateway.training.postgres import PostgresStore
from gateway.training.records import RunRecord, SessionRecord
from gateway.training.service import run as serve
from gateway.training.settings import TrainingSettings
from gateway.training.store import Store
from gateway.training.waiting import waited_for
from gateway.training.work import CreateRun, Step
from loadtest.postgres import PostgresServer
from tests.catalog.postgres.fleet import CuttingProxy
from tests.gateway.fleet_states import BASE
from tests.gateway.mesh import Told, until
from tests.gateway.stub_engine import StubEngine
from wire.outcomes import JournalUnavailable
from wire.trainer import Adam

from .fake_trainer import FakeTrainer
from .rig import Rig, completion
from .test_restarts import published, train_and_publish

MAP_BYTES = 1 << 26
RUN = RunRecord("s:train:0", "s", "acme", "k", "acme/a", "tiny", 4, 32.0, 1, True, True, 0)
BEGIN = CreateRun(base="tiny", rank=4)


def open_store(folder: Path, url: str, name: str = "here") -> PostgresStore:
    return PostgresStore(folder, map_bytes=MAP_BYTES, url=url, name=name)


@asynccontextmanager
async def opened(folder: Path, url: str, name: str = "here") -> AsyncIterator[Journal]:
    store = open_store(folder, url, name)
    try:
        yield Journal(store)
    finally:
        await store.close()


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.database()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.3)


async def test_another_host_finds_all_of_it(url: str, tmp_path: Path) -> None:
    async with opened(tmp_path / "a", url) as journal:
        await journal.begin_run(RUN, BEGIN)
        session = await journal.open_session("acme", "k", {"policy": "a"})
        step = (await journal.accept(RUN.model_id, 1, "acme", Step(adam=Adam()))).operation
    async with opened(tmp_path / "b", url) as journal:
        assert journal.run(RUN.model_id) == RUN
        assert journal.session(session.session_id) == session
        assert sorted(each.seq for each in journal.pending()) == [0, 1]
        assert journal.ask(step.request_id) == Step(adam=Adam())
        await journal.finish(session.session_id, "success")
    # the first host's copy is behind by now
    async with opened(tmp_path / "a", url) as journal:
        found = journal.session(session.session_id)
        assert isinstance(found, SessionRecord) and found.finished == "success"


async def test_one_process_at_a_time_has_a_service(url: str, tmp_path: Path, hasty: None) -> None:
    async with opened(tmp_path / "a", url) as journal:
        with pytest.raises(JournalUnavailable, match="another process has training service here"):
            open_store(tmp_path / "b", url)
        async with opened(tmp_path / "b", url, "there") as other:
            await journal.begin_run(RUN, BEGIN)
            assert other.run(RUN.model_id) is None
            await other.begin_run(RUN, BEGIN)


async def test_who_was_taken_over_from_can_write_nothing(
    url: str, postgres: PostgresServer, tmp_path: Path, hasty: None
) -> None:
    store = open_store(tmp_path / "a", url)
    journal = Journal(store)
    await journal.begin_run(RUN, BEGIN)
    # as a network does that fails on one side only
    postgres.query(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> "
        "pg_backend_pid()",
        url=url,
    )
    async with opened(tmp_path / "b", url) as other:
        for _ in range(2):
            with pytest.raises(JournalUnavailable, match="taken over"):
                await journal.accept(RUN.model_id, 1, "acme", Step(adam=Adam()))
        assert (await other.accept(RUN.model_id, 1, "acme", Step(adam=Adam(beta1=0.5)))).new
        assert "taken over" in store.lost
    await store.close()
    async with opened(tmp_path / "a", url) as journal:
        step = max(journal.pending(), key=lambda each: each.seq)
        assert journal.ask(step.request_id) == Step(adam=Adam(beta1=0.5))


async def test_a_commit_that_was_not_confirmed_is_found(url: str, postgres: PostgresServer, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="roost-") as folder:
        async with CuttingProxy(Path(folder), postgres.folder) as proxy:
            through = url.replace(str(postgres.folder), folder)
            # the store blocks the loop while it opens, and the proxy runs on it
            store = await asyncio.to_thread(open_store, tmp_path / "a", through)
            journal = Journal(store)
            proxy.cutting = True
            assert (await journal.begin_run(RUN, BEGIN)).new
            assert proxy.cuts == 1
            assert not (await journal.begin_run(RUN, BEGIN)).new
            await store.close()
    async with opened(tmp_path / "b", url) as journal:
        assert len(journal.pending()) == 1


async def test_a_journal_of_one_host_moves_and_its_copy_is_no_journal(url: str, tmp_path: Path) -> None:
    alone = Store(tmp_path / "a", map_bytes=MAP_BYTES)
    await Journal(alone).begin_run(RUN, BEGIN)
    await alone.close()
    async with opened(tmp_path / "a", url) as journal:
        assert journal.run(RUN.model_id) == RUN
    with pytest.raises(JournalUnavailable, match="copy of one in PostgreSQL"):
        Store(tmp_path / "a", map_bytes=MAP_BYTES)
    async with opened(tmp_path / "b", url) as journal:
        assert [each.seq for each in journal.pending()] == [0]


async def test_a_service_goes_on_where_another_host_was_killed(url: str, tmp_path: Path) -> None:
    async with Rig(tmp_path, journal=url, state_dir=str(tmp_path / "host-a")) as rig:
        run = await rig.run(await rig.session())
        accepted = [await rig.train(run, seq) for seq in range(1, 5)]
        for each in accepted:
            await rig.result(each)
        rig.trainer.seconds[run] = 0.2
        late = await rig.step(run, 5)
        await rig.crash()
        rig.given["state_dir"] = str(tmp_path / "host-b")
        await rig.restart()
        assert (await rig.result(late))["metrics"]["step:max"] == 1
        # what the trainer's snapshot lacks is in the journal
        assert [number for _, _, number in rig.trainer.log] == [4, 5]


async def a_sample_that_is_slow(rig: Rig) -> Told:
    async def slowly(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        return await completion(engine, request, body)

    rig.mesh.engine.scripts.append(slowly)
    body = {"session_id": await rig.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    name = (await rig.ask("create_sampling_session", body)).json["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    asked = {"sampling_session_id": name, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    accepted = await rig.ask("asample", asked)
    await until(lambda: bool(rig.mesh.engine.asked))
    return accepted


async def test_while_postgres_is_away_clients_are_told_to_come_again(
    own_postgres: PostgresServer, tmp_path: Path, hasty: None
) -> None:
    async with Rig(tmp_path, journal=own_postgres.database()) as rig:
        run = await rig.run(await rig.session())
        rig.trainer.seconds[run] = 0.3
        first = await rig.train(run, 1)
        drawn = await a_sample_that_is_slow(rig)
        await asyncio.to_thread(own_postgres.kill)
        refused = await rig.train(run, 2)
        assert refused.status == 503
        assert "part of the service is not available" in refused.json["error"] or "PostgreSQL" in refused.json["error"]
        # the first operation and the sample are done by now, and can't be written
        await asyncio.sleep(1.5)
        await asyncio.to_thread(own_postgres.start)
        await rig.result(first)
        assert len((await rig.result(drawn))["sequences"]) == 1
        await rig.result(await rig.train(run, 2))
        assert [number for _, _, number in rig.trainer.log] == [1, 2]


async def test_a_service_waits_for_a_journal_that_another_has_and_takes_over(
    url: str, tmp_path: Path, hasty: None
) -> None:
    async with Rig(tmp_path, journal=url) as rig:
        run = await rig.run(await rig.session())
        await rig.result(await rig.train(run, 1))
        late = await rig.train(run, 2)
        # on the same socket, where the gateway looks for it once its connections to the first are broken
        second = rig.settings(state_dir=str(tmp_path / "host-b"))
        stop = asyncio.Event()

        def make(settings: TrainingSettings) -> FakeTrainer:
            return FakeTrainer(settings.trainer, rig.folder / "trainer")

        Path(rig.socket).unlink()  # noqa: ASYNC240
        waiting = asyncio.create_task(serve(second, stop, make=make, catalog=rig.catalog_source()))
        try:
            await until(lambda: Path(rig.socket).exists())
            assert await health_at(rig.socket) == "waiting"
            await rig.crash()
            await until_well(rig.socket)
            assert "metrics" in await rig.result(late)
            assert "metrics" in await rig.result(await rig.train(run, 3))
            assert not waiting.done()
        finally:
            stop.set()
            await waiting


async def health_at(socket: str) -> str:
    """What the service says of itself."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket), timeout=aiohttp.ClientTimeout(2)) as client,
        client.get("http://training/api/v1/healthz") as answer,
    ):
        return str((await answer.json())["status"])


async def until_well(socket: str) -> None:
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                if await health_at(socket) == "ok":
                    return
            await asyncio.sleep(0.05)


async def test_a_start_outlives_a_database_that_is_away(own_postgres: PostgresServer, tmp_path: Path) -> None:
    url = own_postgres.database()
    own_postgres.stop()
    stop, socket = asyncio.Event(), str(tmp_path / "s")
    opening = asyncio.create_task(waited_for(lambda: open_store(tmp_path / "a", url), socket, stop))
    await until(lambda: Path(socket).exists())
    assert await health_at(socket) == "waiting"
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket)) as client,
        client.post("http://training/api/v1/asample", json={}) as answer,
    ):
        assert answer.status == 503
        assert "waits for its journal" in (await answer.json())["error"]
    await asyncio.to_thread(own_postgres.start)
    store = await opening
    assert store is not None
    await store.close()
    with pytest.raises(JournalUnavailable, match="refuses the connection"):
        await waited_for(lambda: open_store(tmp_path / "b", own_postgres.address("nowhere")), socket, stop)
    stop.set()
    assert await waited_for(lambda: open_store(tmp_path / "b", url), socket, stop) is None


async def test_kills_of_postgres_lose_nothing_and_do_nothing_twice(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with Rig(tmp_path / "a") as calm:
        expected = await train_and_publish(calm, 6)
        digests = published(calm)
    async with Rig(tmp_path / "b", journal=own_postgres.database()) as rig:
        rig.trainer.pause_s = 0.05
        training = asyncio.create_task(train_and_publish(rig, 6))
        kills = 0
        while kills < 6 and not training.done():
            await asyncio.sleep(0.6)
            if kills % 2:
                await asyncio.to_thread(own_postgres.kill_a_backend)
            else:
                await asyncio.to_thread(own_postgres.kill)
                await asyncio.to_thread(own_postgres.start)
            kills += 1
        assert await training == expected
        assert published(rig) == digests
        assert kills >= 2
