"""Two registrars on one journal and one store: what one of them sweeps away, the other does not name meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from catalog.blobs import Swept
from catalog.environment import Environment
from catalog.objects.presence import Presence
from catalog.objects.store import ObjectStore
from catalog.postgres.ledger import PostgresLedger
from catalog.postgres.local_view import LocalView
from loadtest.postgres import PostgresServer
from tests.catalog.harness import BASE, add_base, facts_of
from tests.catalog.test_presence import HOUR_S, Bucket, total
from tests.object_storage import REGION, FaultyProxy, ObjectServer, delay
from wire.events import ArtifactFacts
from wire.outcomes import Outcome
from wire.registrar import (
    CollectOrphans,
    Committed,
    ImportedRevision,
    ImportRevisions,
    PublishRevision,
    Refusal,
)

pytestmark = pytest.mark.usefixtures("s3_keys")


class Host:
    """A registrar's ledger, and what it sees of the store."""

    def __init__(self, folder: Path, url: str, bucket: Bucket) -> None:
        store = ObjectStore(bucket.url, endpoint=bucket.proxy.endpoint, region=REGION, now=bucket.clock)
        self.presence = Presence(store, shared=True)
        self._environment = Environment.create(folder, map_bytes=1 << 24)
        self.ledger = PostgresLedger(url, self.presence, LocalView(self._environment))
        self.ledger.open()

    def run(self, command: PublishRevision | ImportRevisions) -> Committed | Refusal:
        (answer,) = self.ledger.run([command]).answers
        assert isinstance(answer, Committed | Refusal)
        return answer

    def close(self) -> None:
        self.ledger.close()
        self._environment.close()


@pytest.fixture
def bucket(s3: ObjectServer, proxy: FaultyProxy) -> Bucket:
    return Bucket(s3, proxy)


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.database()


@pytest.fixture
def hosts(tmp_path: Path, url: str, bucket: Bucket) -> Iterator[list[Host]]:
    made = [Host(tmp_path / name, url, bucket) for name in ("here", "there")]
    made[0].ledger.run([add_base()])
    yield made
    for host in made:
        host.close()


def artifact(bucket: Bucket, content: bytes) -> ArtifactFacts:
    with bucket.store.writer() as writer:
        writer.write(content)
        return facts_of(writer.commit())


def publish(facts: ArtifactFacts) -> PublishRevision:
    return PublishRevision(policy="acme/bot", artifact=facts, create_over=BASE)


def begun(host: Host, bucket: Bucket) -> Iterator[Swept]:
    """A sweep whose deletion is under way."""
    bucket.proxy.inject(delay(1.0), method="POST", path="delete")
    steps = host.ledger.sweep(CollectOrphans(older_than_s=HOUR_S))
    while not host.presence.sweeping:
        next(steps)
    return steps


def test_nobody_names_what_is_being_removed_and_all_may_write_meanwhile(bucket: Bucket, hosts: list[Host]) -> None:
    here, there = hosts
    orphan, other = artifact(bucket, b"orphan"), artifact(bucket, b"other")
    there.presence.look(other.digest)
    there.run(publish(other))
    bucket.clock.ahead_s = 2 * HOUR_S
    assert there.presence.look(orphan.digest) == orphan.size
    steps = begun(here, bucket)
    external = ImportRevisions(
        revisions=(ImportedRevision(policy="acme/bot", base=BASE, artifact=orphan),), external=True
    )
    for host in hosts:
        for command in (publish(orphan), external):
            answer = host.run(command)
            assert isinstance(answer, Refusal)
            assert (answer.outcome, answer.field) == (Outcome.ARTIFACT_UNAVAILABLE, "digest")
            assert answer.retry_after_s
    there.presence.look(other.digest)
    assert isinstance(there.run(PublishRevision(policy="acme/else", artifact=other, create_over=BASE)), Committed)
    assert bucket.store.size(orphan.digest) == orphan.size
    assert total(steps).removed == 1
    # what the other saw before the deletion is not believed after it
    answer = there.run(publish(orphan))
    assert isinstance(answer, Refusal)
    assert answer.outcome is Outcome.ARTIFACT_UNAVAILABLE
    bucket.clock.ahead_s = 0.0
    again = artifact(bucket, b"orphan")
    there.presence.look(again.digest)
    assert isinstance(there.run(publish(again)), Committed)


def test_what_a_dead_registrar_was_removing_may_be_named_after_a_while(
    bucket: Bucket, hosts: list[Host], postgres: PostgresServer, url: str
) -> None:
    _, there = hosts
    orphan = artifact(bucket, b"orphan")
    insert = "INSERT INTO roost.sweeping (sweep, digest, until) VALUES ('dead', $1, now() + make_interval(secs => $2))"
    postgres.query(insert, orphan.digest, 3600.0, url=url)
    assert isinstance(there.run(publish(orphan)), Refusal)
    postgres.query("UPDATE roost.sweeping SET until = now() - interval '1 second'", url=url)
    there.presence.look(orphan.digest)
    assert isinstance(there.run(publish(orphan)), Committed)
    bucket.clock.ahead_s = 2 * HOUR_S
    artifact(bucket, b"another")
    assert total(there.ledger.sweep(CollectOrphans(older_than_s=HOUR_S))).removed == 1
    assert {row["sweep"] for row in postgres.query("SELECT sweep FROM roost.sweeping", url=url)}.isdisjoint({"dead"})
