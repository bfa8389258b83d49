"""What only a journal in PostgreSQL can meet: lost confirmations, other releases, servers that would lose commits."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from catalog.batch import BatchCommand
from catalog.blobs import BlobStore
from catalog.environment import Environment
from catalog.layout import LAYOUT_VERSION
from catalog.postgres.ledger import PostgresLedger
from catalog.postgres.local_view import LocalView
from catalog.postgres.schema import VERSION
from loadtest.postgres import PostgresServer
from tests.catalog.harness import BASE, TARGETS, add_base, upload
from tests.catalog.postgres.fleet import CuttingProxy
from tests.catalog.postgres.harness import PostgresCatalog
from wire.events import ArtifactFacts, Retention, Split
from wire.outcomes import JournalUnavailable, Outcome
from wire.registrar import (
    Committed,
    CondemnArtifacts,
    CreatePolicy,
    ImportedRevision,
    ImportRevisions,
    MoveChannel,
    PruneNext,
    PruneRevisions,
    PublishRevision,
    Refusal,
    RenamePolicy,
    Rollback,
    SetRetention,
)

POLICY = "acme/support"


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.database()


@pytest.fixture
def fleet_catalog(url: str, tmp_path: Path) -> Iterator[PostgresCatalog]:
    made = PostgresCatalog(tmp_path, url)
    made.run(add_base())
    for content in (b"one", b"two", b"three"):
        made.publish(POLICY, content)
    yield made
    made.close()


def test_the_same_command_under_the_same_id_has_its_effect_once(fleet_catalog: PostgresCatalog) -> None:
    back = Rollback(policy=POLICY, command_id="once")
    first, second, other = fleet_catalog.answers(back, back, Rollback(policy=POLICY, command_id="another"))
    assert isinstance(first, Committed)
    assert (first.revision, second) == (2, first)
    assert isinstance(other, Committed)
    assert other.revision == 1
    assert fleet_catalog.run(back) == first
    assert fleet_catalog.view.position() == other.seq


@pytest.mark.parametrize("command_id", ["once", "not a word", "x" * 500, "a\0b"])
def test_an_id_belongs_to_one_command(fleet_catalog: PostgresCatalog, command_id: str) -> None:
    fleet_catalog.run(Rollback(policy=POLICY, command_id="once"))
    (answer,) = fleet_catalog.answers(Rollback(policy=POLICY, to=1, command_id=command_id))
    assert isinstance(answer, Refusal)
    assert (answer.outcome, answer.field) == (Outcome.INVALID_REQUEST, "command_id")


def test_what_nodes_hold_is_no_part_of_what_was_asked(fleet_catalog: PostgresCatalog) -> None:
    fleet_catalog.run(SetRetention(policy=POLICY, retention=Retention(keep_last=1)))
    first = fleet_catalog.run(PruneRevisions(policy=POLICY, command_id="once"))
    assert first.count == 2
    assert fleet_catalog.run(PruneRevisions(policy=POLICY, command_id="once", in_use=("a" * 64,))) == first


def test_what_was_refused_may_be_asked_again_under_its_id(fleet_catalog: PostgresCatalog) -> None:
    late = MoveChannel(policy=POLICY, channel="canary", target=(Split(4),), command_id="late")
    (refused,) = fleet_catalog.answers(late)
    assert isinstance(refused, Refusal)
    fleet_catalog.publish(POLICY, b"four")
    assert fleet_catalog.run(late).revision == 4


class Statements:
    """Counts what is sent to PostgreSQL."""

    def __init__(self, catalog: PostgresCatalog) -> None:
        self.sent = 0
        connection = catalog.ledger._connection  # type: ignore[attr-defined]
        connection.add_query_logger(self._count)

    def _count(self, _: object) -> None:
        self.sent += 1

    def of(self, catalog: PostgresCatalog, *commands: BatchCommand) -> int:
        """Those that it takes to run ``commands``, none of which may be refused."""
        before = self.sent
        batch = PostgresLedger.run(catalog.ledger, commands)  # type: ignore[arg-type]
        taken = self.sent - before
        assert all(isinstance(answer, Committed) for answer in batch.answers), batch.answers
        # what follows what was committed is not counted
        catalog.ledger.run([])
        return taken


@pytest.fixture
def statements(fleet_catalog: PostgresCatalog) -> Statements:
    return Statements(fleet_catalog)


# begin, the lock, the head, what was done before; the events, their notification, rows of three kinds, the answers, the
# commit: the others are for reading
_WRITING = 11


def imported(number: int, *, policy: str, revision: int = 0) -> ImportedRevision:
    facts = ArtifactFacts(f"{number:064x}", 7, 8, TARGETS, "bf16", 4, 1024)
    return ImportedRevision(policy=policy, base=BASE, artifact=facts, revision=revision)


def history(count: int, policy: str = POLICY) -> ImportRevisions:
    """``count`` revisions of one policy, which has three already."""
    revisions = tuple(imported(number, policy=policy, revision=number) for number in range(4, count + 4))
    return ImportRevisions(revisions=revisions, external=True)


def test_a_batch_takes_few_round_trips_whatever_its_size(
    fleet_catalog: PostgresCatalog, statements: Statements
) -> None:
    facts = [upload(fleet_catalog.store, b"content %d" % number) for number in range(200)]
    publishes = [
        PublishRevision(policy=f"acme/p{number % 50}", artifact=artifact, create_over=BASE)
        for number, artifact in enumerate(facts)
    ]
    assert statements.of(fleet_catalog, *publishes) <= _WRITING + 4
    assert fleet_catalog.resolve("acme/p7").revision == 4


def test_an_import_takes_few_round_trips_whatever_its_size(
    fleet_catalog: PostgresCatalog, statements: Statements
) -> None:
    first = tuple(imported(number, policy=f"acme/p{number % 400}") for number in range(1000, 2000))
    assert statements.of(fleet_catalog, ImportRevisions(revisions=first, external=True)) <= _WRITING + 2
    more = tuple(imported(number, policy=f"acme/p{number % 400}") for number in range(2000, 3000))
    assert statements.of(fleet_catalog, ImportRevisions(revisions=more, external=True)) <= _WRITING + 5
    again = tuple(imported(1000 + number, policy=f"acme/p{number + 200}", revision=1) for number in range(200))
    assert statements.of(fleet_catalog, ImportRevisions(revisions=again, external=True)) <= _WRITING + 5


def test_what_concerns_all_revisions_of_a_policy_takes_few_round_trips(
    fleet_catalog: PostgresCatalog, statements: Statements
) -> None:
    fleet_catalog.run(history(600))
    splits = tuple(Split(number) for number in range(10, 18))
    assert statements.of(fleet_catalog, MoveChannel(policy=POLICY, channel="canary", target=splits)) <= _WRITING + 6
    fleet_catalog.run(MoveChannel(policy=POLICY, channel="canary"))
    for name in ("acme/renamed", POLICY):
        former = POLICY if name != POLICY else "acme/renamed"
        assert statements.of(fleet_catalog, RenamePolicy(policy=former, to=name)) <= _WRITING + 8
    fleet_catalog.run(SetRetention(policy=POLICY, retention=Retention(keep_last=1)))
    fleet_catalog.run(MoveChannel(policy=POLICY, channel="canary", target=(Split(1),)))
    assert statements.of(fleet_catalog, PruneRevisions(policy=POLICY)) <= _WRITING + 8
    assert fleet_catalog.view.revision(POLICY, 600).retired_ms  # type: ignore[union-attr]
    assert statements.of(fleet_catalog, Rollback(policy=POLICY)) <= _WRITING + 16
    assert fleet_catalog.resolve(POLICY).revision == 1
    assert statements.of(fleet_catalog, PruneNext()) <= _WRITING + 10
    assert statements.of(fleet_catalog, CondemnArtifacts()) <= _WRITING + 4


@pytest.mark.parametrize("setting", ["synchronous_commit", "fsync"])
def test_a_server_that_would_lose_commits_is_refused(setting: str, tmp_path: Path) -> None:
    server = PostgresServer({setting: "off"})
    try:
        server.start()
        with pytest.raises(JournalUnavailable, match=f"{setting} = off"):
            opened(server.database(), tmp_path)
    finally:
        server.close()


def opened(url: str, folder: Path) -> PostgresLedger:
    environment = Environment.create(folder / "catalog", map_bytes=1 << 24)
    ledger = PostgresLedger(url, BlobStore(folder / "store"), LocalView(environment))
    try:
        ledger.open()
    finally:
        ledger.close()
        environment.close()
    return ledger


def test_a_schema_of_a_later_release_is_refused(postgres: PostgresServer, url: str, tmp_path: Path) -> None:
    opened(url, tmp_path)
    postgres.query("UPDATE roost.version SET schema = schema + 1", url=url)
    with pytest.raises(JournalUnavailable, match=f"has version {VERSION + 1}.* a later release"):
        opened(url, tmp_path)


def test_records_of_an_earlier_layout_are_made_anew_from_the_journal(
    postgres: PostgresServer, url: str, tmp_path: Path, fleet_catalog: PostgresCatalog
) -> None:
    fleet_catalog.run(Rollback(policy=POLICY))
    before = postgres.query("SELECT * FROM roost.records ORDER BY kind, key", url=url)
    postgres.query("UPDATE roost.records SET record = 'other'", url=url)
    postgres.query("UPDATE roost.version SET layout = $1", LAYOUT_VERSION - 1, url=url)
    opened(url, tmp_path / "other")
    assert postgres.query("SELECT * FROM roost.records ORDER BY kind, key", url=url) == before


def test_an_unknown_user_is_told_and_not_waited_for(url: str, tmp_path: Path) -> None:
    with pytest.raises(JournalUnavailable, match='role "nobody-at-all" does not exist'):
        opened(url.replace("roost@", "nobody-at-all@"), tmp_path)


@pytest.mark.parametrize("command_id", ["", "given"])
async def test_a_commit_whose_confirmation_is_lost_is_found_again(
    postgres: PostgresServer, url: str, command_id: str
) -> None:
    """The answer to COMMIT never arrives; the registrar finds under the command's id that it was done."""
    with tempfile.TemporaryDirectory(prefix="roost-") as name:
        folder = Path(name)
        async with CuttingProxy(folder, postgres.folder) as proxy:
            through = url.replace(str(postgres.folder), name)
            catalog = await asyncio.to_thread(PostgresCatalog, folder, through)
            run = catalog.ledger.run
            await asyncio.to_thread(run, [add_base()])
            facts = [upload(catalog.store, content) for content in (b"one", b"two", b"three")]
            for artifact in facts:
                await asyncio.to_thread(run, [PublishRevision(policy=POLICY, artifact=artifact, create_over=BASE)])
            proxy.cutting = True
            batch = await asyncio.to_thread(run, [Rollback(policy=POLICY, command_id=command_id)])
            assert proxy.cuts == 1
            (answer,) = batch.answers
            assert isinstance(answer, Committed)
            assert (answer.revision, answer.seq) == (2, 6)
            assert catalog.view.position() == 6
            await asyncio.to_thread(catalog.close)


async def test_a_commit_in_doubt_is_told_as_such_and_may_be_asked_again_elsewhere(
    url: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catalog.postgres.ledger._PATIENCE_S", 0.5)
    create = CreatePolicy(policy=POLICY, base=BASE, command_id="in-doubt")
    with tempfile.TemporaryDirectory(prefix="roost-") as name:
        folder = Path(name)
        async with CuttingProxy(folder, postgres.folder) as proxy:
            catalog = await asyncio.to_thread(PostgresCatalog, folder, url.replace(str(postgres.folder), name))
            await asyncio.to_thread(catalog.ledger.run, [add_base()])
            proxy.cutting = proxy.closed = True
            # the plain ledger: nothing can be followed while nobody is let in
            batch = await asyncio.to_thread(PostgresLedger.run, catalog.ledger, [create])
            (answer,) = batch.answers
            assert isinstance(answer, Refusal)
            assert answer.outcome is Outcome.JOURNAL_UNAVAILABLE
            assert "may have had its effect or not" in answer.message
            await asyncio.to_thread(catalog.close)
        environment = Environment.create(folder / "elsewhere", map_bytes=1 << 24)
        elsewhere = PostgresLedger(url, catalog.store, LocalView(environment))
        (answer,) = (await asyncio.to_thread(elsewhere.run, [create])).answers
        assert isinstance(answer, Committed)
        assert (answer.seq, answer.changed) == (2, True)
        await asyncio.to_thread(elsewhere.close)
        environment.close()
