"""The registrar as the other processes meet it: over its sockets, and by memory map."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from catalog.client import RegistrarClient
from catalog.follow import JournalFollower
from catalog.names import parse_reference
from catalog.replay import check_catalog
from catalog.view import CatalogView
from tests.catalog.harness import BASE, add_base, upload
from tests.catalog.processes import ROOT, RegistrarProcess, eventually
from wire.curve import CurveKeys, make_keys
from wire.events import ArtifactFacts
from wire.outcomes import ArtifactUnavailable, JournalUnavailable, NotFound
from wire.registrar import (
    AnyCommand,
    Collected,
    CollectOrphans,
    CreatePolicy,
    ImportedRevision,
    ImportRevisions,
    JournalSlice,
    PublishRevision,
    ReadJournal,
    Rollback,
)

READER = """
import sys
from pathlib import Path
from catalog.names import parse_reference
from catalog.view import CatalogView
view = CatalogView.open(Path(sys.argv[1]))
for line in sys.stdin:
    print(view.resolve(parse_reference(line.strip())).reference, flush=True)
"""


@pytest.fixture
def registrar() -> Iterator[RegistrarProcess]:
    with tempfile.TemporaryDirectory(prefix="roost-") as folder:
        made = RegistrarProcess(Path(folder))
        made.start()
        yield made
        made.close()


@pytest.fixture
def reader(registrar: RegistrarProcess) -> Iterator[subprocess.Popen[str]]:
    """A process that resolves each line it is given."""
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(registrar.catalog_dir)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=10) == 0


async def test_a_publish_is_seen_by_a_reader_in_another_process_at_once(
    registrar: RegistrarProcess, reader: subprocess.Popen[str]
) -> None:
    client = registrar.client()
    await client.run(add_base())
    assert reader.stdin is not None
    assert reader.stdout is not None
    for revision in range(1, 20):
        facts = upload(registrar.store, b"revision %d" % revision)
        answer = await client.run(PublishRevision(policy="acme/a", artifact=facts, create_over=BASE))
        reader.stdin.write("acme/a\n")
        reader.stdin.flush()
        assert await asyncio.to_thread(reader.stdout.readline) == f"acme/a@{revision}\n"
        assert answer.revision == revision
    client.close()


async def test_a_reader_follows_a_map_that_grows(registrar: RegistrarProcess) -> None:
    client = registrar.client()
    await client.run(add_base())
    view = CatalogView.open(registrar.catalog_dir)
    large = b" " * (1 << 20)
    # the map of the settings has 64 MiB
    for number in range(80):
        base = add_base(f"base{number}")
        await client.run(type(base)(name=base.name, fingerprint=base.fingerprint, path="/m", config=large))
    assert len(view.bases()) == 81
    assert view.position() == 81
    view.close()
    client.close()


async def test_what_it_refuses_is_raised_by_the_client(registrar: RegistrarProcess) -> None:
    client = registrar.client()
    with pytest.raises(NotFound) as caught:
        await client.run(CreatePolicy(policy="acme/a", base="missing"))
    assert (caught.value.field, caught.value.message) == ("base", "there is no base missing: add it first")
    await client.run(add_base())
    facts = upload(registrar.store, b"one")
    registrar.store.path(facts.digest).unlink()
    with pytest.raises(ArtifactUnavailable):
        await client.run(PublishRevision(policy="acme/a", artifact=facts, create_over=BASE))
    collected = await client.run(CollectOrphans(older_than_s=0.0))
    assert collected == Collected(removed=0, bytes=0)
    journal = await client.run(ReadJournal(after=0))
    assert isinstance(journal, JournalSlice)
    assert journal.last == 1
    client.close()


async def test_sigterm_ends_it_cleanly_and_it_comes_back(registrar: RegistrarProcess) -> None:
    client = registrar.client()
    await client.run(add_base())
    assert registrar.terminate() == 0
    with pytest.raises(JournalUnavailable):
        await client.run(CreatePolicy(policy="acme/a", base=BASE), timeout_s=5.0)
    registrar.start()
    await eventually_runs(client, CreatePolicy(policy="acme/a", base=BASE))
    assert "Traceback" not in registrar.logged()
    client.close()


async def test_a_second_registrar_of_the_same_catalog_is_refused(registrar: RegistrarProcess) -> None:
    first = registrar.process
    second = registrar.spawn()
    assert await asyncio.to_thread(second.wait, 30) == 1
    assert first is not None
    assert f"another registrar (process {first.pid}) writes the catalog" in registrar.logged()
    registrar.process = first
    client = registrar.client()
    assert (await client.run(add_base())).changed
    client.close()


@pytest.mark.parametrize("settings", ["not json", "{}", '{"catalog_dir": 3}'])
def test_wrong_settings_are_one_clear_line(tmp_path: Path, settings: str) -> None:
    file = tmp_path / "settings.json"
    file.write_text(settings)
    ended = subprocess.run(
        [sys.executable, "-m", "catalog", "--settings", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


async def test_a_follower_gets_every_event_once_and_in_order_across_restarts(registrar: RegistrarProcess) -> None:
    client = registrar.client()
    await client.run(add_base())
    seen: list[int] = []
    follower = JournalFollower(registrar.feed_endpoint, client, lambda event: seen.append(event.seq), after=0)
    await eventually(lambda: seen == [1])
    for number in range(5):
        await client.run(CreatePolicy(policy=f"acme/p{number}", base=BASE))
    await eventually(lambda: follower.position == 6)
    registrar.kill()
    registrar.start()
    await eventually_runs(client, CreatePolicy(policy="acme/after", base=BASE))
    await eventually(lambda: follower.position == 7)
    assert seen == list(range(1, 8))
    follower.close()
    client.close()


async def test_a_follower_gets_every_event_of_an_import(registrar: RegistrarProcess) -> None:
    client = registrar.client()
    await client.run(add_base())
    seen: list[int] = []
    follower = JournalFollower(registrar.feed_endpoint, client, lambda event: seen.append(event.seq), after=0)
    await eventually(lambda: seen == [1])
    facts = ArtifactFacts("a" * 64, 1000, 8, ("q", "v"), "bf16", 4, 1024)
    revisions = tuple(ImportedRevision(policy=f"acme/p{number}", base=BASE, artifact=facts) for number in range(1500))
    await client.run(ImportRevisions(revisions=revisions, external=True))
    await eventually(lambda: follower.position == 3001)
    assert seen == list(range(1, 3002))
    follower.close()
    client.close()


async def eventually_runs(client: RegistrarClient, command: AnyCommand, timeout_s: float = 20.0) -> None:
    """Ask until somebody answers."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                await client.run(command, timeout_s=2.0)
            except JournalUnavailable:
                await asyncio.sleep(0.05)
            else:
                return


async def test_with_keys_only_known_peers_are_answered() -> None:
    server, friend, stranger = make_keys(), make_keys(), make_keys()
    with tempfile.TemporaryDirectory(prefix="roost-") as folder:
        registrar = RegistrarProcess(Path(folder), curve=CurveKeys(*server, peers=(friend[0],)))
        try:
            await asyncio.to_thread(registrar.start)
            known = RegistrarClient(registrar.endpoint, curve=CurveKeys(*friend, server_public=server[0]))
            unknown = RegistrarClient(registrar.endpoint, curve=CurveKeys(*stranger, server_public=server[0]))
            assert (await known.run(add_base())).seq == 1
            with pytest.raises(JournalUnavailable):
                await unknown.run(CreatePolicy(policy="acme/a", base=BASE), timeout_s=2.0)
            known.close()
            unknown.close()
        finally:
            registrar.close()


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    registrar = RegistrarProcess(tmp_path)
    registrar.catalog_dir.write_text("a file where the folder should be")
    assert registrar.spawn().wait(timeout=30) == 1
    (line,) = registrar.logged().splitlines()
    assert "can't be written: File exists" in line


class Publisher:
    """Publishes new revisions of its own policy for as long as it is answered; ``acknowledged`` is what it was told."""

    def __init__(self, registrar: RegistrarProcess, name: str) -> None:
        self.policy = f"acme/{name}"
        self.acknowledged: dict[int, str] = {}
        self._registrar = registrar
        self._count = 0

    async def run(self, life: int) -> None:
        client = self._registrar.client()
        try:
            while True:
                self._count += 1
                facts = upload(self._registrar.store, f"{self.policy} {life} {self._count}".encode())
                answer = await client.run(
                    PublishRevision(policy=self.policy, artifact=facts, create_over=BASE), timeout_s=10.0
                )
                self.acknowledged[answer.revision] = answer.digest
        except JournalUnavailable:
            return
        finally:
            client.close()


async def kill_under_load(registrar: RegistrarProcess, *, kills: int) -> None:
    client = registrar.client()
    await client.run(add_base())
    client.close()
    publishers = [Publisher(registrar, f"p{number}") for number in range(8)]
    for life in range(kills):
        before = sum(len(publisher.acknowledged) for publisher in publishers)
        loads = [asyncio.ensure_future(publisher.run(life)) for publisher in publishers]
        # another moment of the load each time: from the first acknowledgements to well within it
        enough = before + 1 + 7 * (life % 11)
        await eventually(lambda: sum(len(p.acknowledged) for p in publishers) >= enough, 60.0)  # noqa: B023
        registrar.kill()
        await asyncio.gather(*loads)
        await asyncio.to_thread(registrar.start)
        check_nothing_is_lost(registrar, publishers)


def check_nothing_is_lost(registrar: RegistrarProcess, publishers: list[Publisher]) -> None:
    view = CatalogView.open(registrar.catalog_dir)
    for publisher in publishers:
        for revision, digest in publisher.acknowledged.items():
            assert view.resolve(parse_reference(f"{publisher.policy}@{revision}")).digest == digest
            registrar.store.verify(digest)
        record = view.policy(publisher.policy)
        revisions = view.revisions(publisher.policy, limit=1_000_000)
        assert len(revisions) == (record.latest if record else 0)
        assert all(registrar.store.size(row.artifact.digest) == row.artifact.size for row in revisions)
    view.close()
    assert check_catalog(registrar.catalog_dir).differences == ()


async def test_killing_it_under_load_loses_no_acknowledged_publish(registrar: RegistrarProcess) -> None:
    await kill_under_load(registrar, kills=4)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_killing_it_many_times_loses_no_acknowledged_publish(registrar: RegistrarProcess) -> None:
    await kill_under_load(registrar, kills=50)


async def test_killed_between_bytes_and_event_a_publish_leaves_an_orphan_that_is_removed(
    registrar: RegistrarProcess,
) -> None:
    client = registrar.client()
    await client.run(add_base())
    named = upload(registrar.store, b"named")
    await client.run(PublishRevision(policy="acme/a", artifact=named, create_over=BASE))
    orphan = upload(registrar.store, b"orphan")
    registrar.kill()
    with pytest.raises(JournalUnavailable):
        await client.run(PublishRevision(policy="acme/a", artifact=orphan), timeout_s=3.0)
    registrar.start()
    await eventually_runs(client, CollectOrphans(older_than_s=3600.0))
    assert registrar.store.size(orphan.digest) == orphan.size
    collected = await client.run(CollectOrphans(older_than_s=0.0))
    assert collected == Collected(removed=1, bytes=6)
    assert registrar.store.size(orphan.digest) is None
    view = CatalogView.open(registrar.catalog_dir)
    assert view.resolve(parse_reference("acme/a")).digest == named.digest
    assert view.artifact(orphan.digest) is None
    view.close()
    with pytest.raises(NotFound):
        await client.run(Rollback(policy="acme/a"))
    client.close()
