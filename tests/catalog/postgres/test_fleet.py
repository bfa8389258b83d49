"""Several registrars on one PostgreSQL, as their clients and the readers of their hosts meet them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from catalog.environment import Environment
from catalog.replay import check_catalog
from catalog.stream import restore, write_snapshot
from catalog.view import CatalogView
from loadtest.postgres import PostgresServer
from tests.catalog.harness import BASE, add_base, upload
from tests.catalog.postgres.fleet import dump, eventually_answered, fleet
from tests.catalog.processes import RegistrarProcess, eventually
from wire.events import Split
from wire.outcomes import DeadlinePassed, InvalidRequest, JournalUnavailable, VersionConflict
from wire.registrar import (
    AwaitPosition,
    CollectOrphans,
    Committed,
    CreatePolicy,
    MoveChannel,
    PublishRevision,
    Reached,
    Rollback,
)

POLICY = "acme/support"


@pytest.fixture
def hosts(postgres: PostgresServer) -> Iterator[list[RegistrarProcess]]:
    with fleet(postgres.database()) as registrars:
        yield registrars


async def test_a_name_is_given_once_and_a_version_conflict_is_seen_by_exactly_one(
    hosts: list[RegistrarProcess],
) -> None:
    clients = [registrar.client() for registrar in hosts]
    await clients[0].run(add_base())
    await clients[1].run(add_base("other", "c" * 64))
    facts = [upload(hosts[0].store, content) for content in (b"one", b"two")]
    for number in range(25):
        name = f"acme/p{number}"
        created = await asyncio.gather(
            clients[0].run(CreatePolicy(policy=name, base=BASE)),
            clients[1].run(CreatePolicy(policy=name, base="other")),
            return_exceptions=True,
        )
        assert sorted(type(answer).__name__ for answer in created) == ["Committed", "VersionConflict"]
        (given,) = (BASE if index == 0 else "other" for index in (0, 1) if isinstance(created[index], Committed))
        both = await asyncio.gather(
            *(
                client.run(PublishRevision(policy=name, artifact=artifact, expected_version=1))
                for client, artifact in zip(clients, facts, strict=True)
            ),
            return_exceptions=True,
        )
        (won,) = (answer for answer in both if isinstance(answer, Committed))
        (lost,) = (answer for answer in both if isinstance(answer, VersionConflict))
        assert won.version == 2
        assert "at version 2, not 1" in lost.message
        for client in clients:
            await client.run(AwaitPosition(seq=won.seq))
        for registrar in hosts:
            view = CatalogView.open(registrar.catalog_dir)
            record = view.policy(name)
            assert record is not None
            assert (record.base, record.latest, record.version) == (given, 1, 2)
            view.close()
    assert dump(hosts[0]) == dump(hosts[1])
    for registrar in hosts:
        assert check_catalog(registrar.catalog_dir).differences == ()
    for client in clients:
        client.close()


async def test_who_is_told_reads_it_on_his_host_and_waits_for_it_on_another(hosts: list[RegistrarProcess]) -> None:
    here, there = (registrar.client() for registrar in hosts)
    await here.run(add_base())
    views = [CatalogView.open(registrar.catalog_dir) for registrar in hosts]
    for number in range(20):
        answer = await here.run(CreatePolicy(policy=f"acme/p{number}", base=BASE))
        assert views[0].policy(f"acme/p{number}") is not None
        reached = await there.run(AwaitPosition(seq=answer.seq))
        assert reached.position >= answer.seq
        assert views[1].policy(f"acme/p{number}") is not None
    with pytest.raises(DeadlinePassed, match="the view is at event 21, not yet at 22"):
        await there.run(AwaitPosition(seq=22, timeout_s=0.1))
    for bad in (AwaitPosition(seq=-1), AwaitPosition(seq=1, timeout_s=float("nan"))):
        with pytest.raises(InvalidRequest):
            await there.run(bad)
    for closed in (here, there, *views):
        closed.close()


async def test_without_postgres_reads_go_on_and_with_it_again_everything_does(own_postgres: PostgresServer) -> None:
    with fleet(own_postgres.database()) as hosts:
        clients = [registrar.client() for registrar in hosts]
        await clients[0].run(add_base())
        published = PublishRevision(
            policy=POLICY, artifact=upload(hosts[0].store, b"one"), create_over=BASE, command_id="first"
        )
        seq = (await clients[0].run(published)).seq
        await clients[1].run(AwaitPosition(seq=seq))
        own_postgres.stop()
        refused = CreatePolicy(policy="acme/later", base=BASE, command_id="later")
        for registrar, client in zip(hosts, clients, strict=True):
            with pytest.raises(JournalUnavailable, match="nothing was changed") as caught:
                await client.run(refused)
            assert caught.value.retry_after_s
            view = CatalogView.open(registrar.catalog_dir)
            assert view.revision(POLICY, 1) is not None
            view.close()
            assert (await client.run(AwaitPosition(seq=seq))).position == seq
        # a registrar that starts meanwhile serves what its host has
        hosts[1].terminate()
        await asyncio.to_thread(hosts[1].start)
        assert await eventually_answered(clients[1], AwaitPosition(seq=seq)) == Reached(position=seq)
        own_postgres.start()
        answers = [await eventually_answered(client, refused) for client in clients]
        assert answers[0] == answers[1]
        assert isinstance(answers[0], Committed)
        assert answers[0].seq == seq + 1
        for client in clients:
            await client.run(AwaitPosition(seq=seq + 1), timeout_s=20)
            client.close()
        assert dump(hosts[0]) == dump(hosts[1])


async def test_a_host_that_comes_late_ends_with_the_same_bytes(postgres: PostgresServer, tmp_path: Path) -> None:
    with fleet(postgres.database(), hosts=1) as (first,):
        client = first.client()
        await client.run(add_base())
        for number in range(200):
            facts = upload(first.store, b"content %d" % (number % 7))
            seq = (
                await client.run(PublishRevision(policy=f"acme/p{number % 20}", artifact=facts, create_over=BASE))
            ).seq
        await client.run(MoveChannel(policy="acme/p1", channel="canary", target=(Split(1), Split(2))))
        seq = (await client.run(Rollback(policy="acme/p1"))).seq
        journal = msgspec.json.decode(first.settings_file.read_bytes())["journal"]
        with fleet(journal, hosts=1) as (late,):
            waiting = late.client()
            await waiting.run(AwaitPosition(seq=seq))
            assert dump(late) == dump(first)
            waiting.close()
        client.close()


async def test_a_host_may_begin_from_a_snapshot_of_another(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.database()
    with fleet(url, hosts=1) as (first,):
        client = first.client()
        await client.run(add_base())
        for number in range(20):
            await client.run(CreatePolicy(policy=f"acme/p{number}", base=BASE))
        environment = Environment.open(first.catalog_dir)
        with (tmp_path / "snapshot").open("wb") as out:
            assert write_snapshot(environment, out).position == 21
        environment.close()
        seq = (await client.run(CreatePolicy(policy="acme/after", base=BASE))).seq
        late = RegistrarProcess(tmp_path, journal=url, store=first.folder / "store")
        with (tmp_path / "snapshot").open("rb") as source:
            restore(source, late.catalog_dir)
        late.start()
        try:
            waiting = late.client()
            await waiting.run(AwaitPosition(seq=seq))
            waiting.close()
            # what the snapshot stands for is not in the late one's journal
            assert [row for row in dump(first) if row[0] != "journal"] == [
                row for row in dump(late) if row[0] != "journal"
            ]
            assert [row for row in dump(late) if row[0] == "journal"] == [
                row for row in dump(first) if row[0] == "journal"
            ][-2:]
        finally:
            late.close()
        client.close()


async def test_orphans_are_told_from_the_journal_and_not_from_the_view(postgres: PostgresServer) -> None:
    with fleet(postgres.database()) as hosts:
        here, there = (registrar.client() for registrar in hosts)
        await here.run(add_base())
        named, orphan = (upload(hosts[0].store, content) for content in (b"named", b"orphan"))
        await here.run(PublishRevision(policy=POLICY, artifact=named, create_over=BASE))
        collected = await there.run(CollectOrphans(older_than_s=0.0))
        assert (collected.removed, collected.bytes) == (1, len(b"orphan"))
        assert hosts[0].store.size(named.digest) is not None
        assert hosts[0].store.size(orphan.digest) is None
        here.close()
        there.close()


async def test_a_host_with_the_view_of_another_journal_is_told_so(postgres: PostgresServer) -> None:
    with fleet(postgres.database(), hosts=1) as (registrar,):
        client = registrar.client()
        await client.run(add_base())
        registrar.terminate()
        settings = msgspec.json.decode(registrar.settings_file.read_bytes())
        settings["journal"] = postgres.database()
        registrar.settings_file.write_bytes(msgspec.json.encode(settings))
        process = registrar.spawn()
        assert await asyncio.to_thread(process.wait, 30) == 1
        assert "the view is of another journal" in registrar.logged().splitlines()[-1]
        client.close()


async def test_registrars_wait_for_a_database_that_is_not_there_yet(
    tmp_path: Path, own_postgres: PostgresServer
) -> None:
    journal = own_postgres.database()
    own_postgres.stop()
    with fleet(journal, hosts=1) as (registrar,):
        client = registrar.client()
        with pytest.raises(JournalUnavailable, match="nothing was changed"):
            await client.run(add_base())
        own_postgres.start()
        await eventually_answered(client, add_base())
        view = CatalogView.open(registrar.catalog_dir)
        await eventually(lambda: view.position() == 1)
        view.close()
        client.close()
