"""The object store as the registrar's ledger sees it: swept, looked into beforehand, never waited for."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from catalog.artifacts import StoreLocation
from catalog.blobs import Stored, Swept
from catalog.client import RegistrarClient
from catalog.objects.presence import Presence
from catalog.objects.store import ObjectStore
from tests.catalog.harness import BASE, Clock, Sweeping, add_base, facts_of
from tests.catalog.processes import RegistrarProcess
from tests.object_storage import REGION, FaultyProxy, ObjectServer, answer, delay
from wire.outcomes import ArtifactUnavailable
from wire.registrar import (
    CollectOrphans,
    Committed,
    CreatePolicy,
    ImportedRevision,
    ImportRevisions,
    PublishRevision,
    RestoreRevision,
    RetireRevision,
)

HOUR_S = 3600.0

pytestmark = pytest.mark.usefixtures("s3_keys")


class Bucket:
    def __init__(self, server: ObjectServer, proxy: FaultyProxy) -> None:
        self.server = server
        self.proxy = proxy
        self.name = server.new_bucket()
        self.url = f"s3://{self.name}/p"
        self.clock = Clock()
        self.store = ObjectStore(self.url, endpoint=server.endpoint, region=REGION)
        self.presence = Presence(ObjectStore(self.url, endpoint=proxy.endpoint, region=REGION, now=self.clock))

    def put(self, content: bytes) -> str:
        with self.store.writer() as writer:
            writer.write(content)
            return writer.commit().digest

    def put_stray(self, key: str) -> None:
        self.server.client.put_object(Bucket=self.name, Key=f"p/{key}", Body=b"stray")

    def objects(self) -> set[str]:
        return {key.removeprefix("p/") for key in self.server.keys(self.name)}


@pytest.fixture
def bucket(s3: ObjectServer, proxy: FaultyProxy) -> Bucket:
    return Bucket(s3, proxy)


def total(steps: Iterator[Swept]) -> Swept:
    swept = Swept(0, 0)
    for step in steps:
        swept = swept.plus(step)
    return swept


class TestSweep:
    def test_removes_what_is_old_and_named_by_nobody(self, bucket: Bucket) -> None:
        named, orphan = bucket.put(b"named"), bucket.put(b"orphan")
        bucket.put_stray("partial/0123")
        bucket.clock.ahead_s = 2 * HOUR_S
        swept = total(bucket.presence.sweep_by_folder(Sweeping(named), HOUR_S))
        assert (swept.removed, swept.bytes) == (2, len(b"orphan") + len(b"stray"))
        assert bucket.objects() == {bucket.store.key(named)}
        assert bucket.presence.look(orphan) is None

    def test_leaves_what_is_young(self, bucket: Bucket) -> None:
        digest = bucket.put(b"just uploaded")
        bucket.put_stray("partial/0123")
        assert total(bucket.presence.sweep_by_folder(Sweeping(), HOUR_S)) == Swept(0, 0)
        assert bucket.objects() == {bucket.store.key(digest), "partial/0123"}

    def test_leaves_what_is_not_its_own(self, bucket: Bucket) -> None:
        for key in ("blobs/ab/README", "elsewhere/x"):
            bucket.put_stray(key)
        bucket.clock.ahead_s = 2 * HOUR_S
        total(bucket.presence.sweep_by_folder(Sweeping(), HOUR_S))
        assert bucket.objects() == {"blobs/ab/README", "elsewhere/x"}

    def test_goes_through_more_than_a_page(self, bucket: Bucket) -> None:
        digests = {bucket.put(str(number).encode()) for number in range(1_050)}
        bucket.clock.ahead_s = 2 * HOUR_S
        kept = min(digests)
        swept = total(bucket.presence.sweep_by_folder(Sweeping(kept), HOUR_S))
        assert swept.removed == len(digests) - 1
        assert bucket.objects() == {bucket.store.key(kept)}

    def test_no_step_waits_for_the_store(self, bucket: Bucket) -> None:
        bucket.put(b"orphan")
        bucket.clock.ahead_s = 2 * HOUR_S
        bucket.proxy.inject(delay(0.5))
        steps = bucket.presence.sweep_by_folder(Sweeping(), HOUR_S)
        longest = 0.0
        while True:
            started = time.monotonic()
            if next(steps, None) is None:
                break
            longest = max(longest, time.monotonic() - started)
        assert longest < 0.25
        assert bucket.objects() == set()

    def test_what_is_being_removed_counts_as_absent(self, bucket: Bucket) -> None:
        """A publish between the sweep's look at the catalog and the removal would name what is about to go."""
        orphan = bucket.put(b"orphan")
        assert bucket.presence.look(orphan) == len(b"orphan")
        assert bucket.presence.size(orphan) == len(b"orphan")
        bucket.clock.ahead_s = 2 * HOUR_S
        bucket.proxy.inject(delay(0.5), method="POST", path="delete")
        orphans = Sweeping()
        steps = bucket.presence.sweep_by_folder(orphans, HOUR_S)
        while not orphans.asked:
            next(steps)
        assert bucket.store.size(orphan) == len(b"orphan")
        assert bucket.presence.size(orphan) is None
        bucket.presence.look(orphan)
        assert bucket.presence.size(orphan) is None
        total(steps)
        assert bucket.presence.look(orphan) is None

    def test_sweeps_that_overlap_absolve_nothing_of_each_other(self, bucket: Bucket) -> None:
        first, second = bucket.put(b"first"), bucket.put(b"second")
        bucket.clock.ahead_s = 2 * HOUR_S
        bucket.proxy.inject(delay(1.0), method="POST", path="delete", times=1)
        orphans = Sweeping(second)
        slow = bucket.presence.sweep_by_folder(orphans, HOUR_S)
        while not orphans.asked:
            next(slow)
        total(bucket.presence.sweep_by_folder(Sweeping(first), HOUR_S))
        assert bucket.store.size(first) is not None
        assert bucket.presence.size(first) is None
        total(slow)
        assert bucket.objects() == set()

    def test_a_store_that_refuses_is_told(self, bucket: Bucket) -> None:
        bucket.put(b"orphan")
        bucket.clock.ahead_s = 2 * HOUR_S
        bucket.proxy.inject(answer(403, "AccessDenied"))
        with pytest.raises(ArtifactUnavailable, match="refuses our credentials"):
            total(bucket.presence.sweep_by_folder(Sweeping(), HOUR_S))

    def test_one_that_is_stopped_midway_condemns_nothing_for_ever(self, bucket: Bucket) -> None:
        digest = bucket.put(b"orphan")
        bucket.clock.ahead_s = 2 * HOUR_S
        orphans = Sweeping()
        steps = bucket.presence.sweep_by_folder(orphans, HOUR_S)
        while not orphans.asked:
            next(steps)
        steps.close()  # type: ignore[attr-defined]
        bucket.put(b"orphan")
        bucket.presence.look(digest)
        assert bucket.presence.size(digest) == len(b"orphan")


class TestLook:
    def test_the_ledger_never_asks_the_store(self, bucket: Bucket) -> None:
        digest, absent = bucket.put(b"adapter"), "0" * 64
        for name in (digest, absent):
            bucket.presence.look(name)
        asked = bucket.proxy.count("HEAD")
        assert bucket.presence.size(digest) == len(b"adapter")
        assert bucket.presence.size(absent) is None
        other = bucket.put(b"another")
        with pytest.raises(ArtifactUnavailable, match="not looked for in time") as told:
            bucket.presence.size(other)
        assert told.value.retry_after_s
        assert bucket.proxy.count("HEAD") == asked
        assert bucket.presence.missed() == {other}
        bucket.presence.look(other)
        assert bucket.presence.size(other) == len(b"another")
        assert bucket.presence.missed() == frozenset()

    def test_what_was_found_is_not_believed_for_long(self, bucket: Bucket) -> None:
        now = 0.0
        presence = Presence(bucket.store, now=lambda: now)
        digest = bucket.put(b"adapter")
        assert presence.look(digest) is not None
        bucket.server.client.delete_object(Bucket=bucket.name, Key=f"p/{bucket.store.key(digest)}")
        assert presence.size(digest) is not None
        now = 60.0
        with pytest.raises(ArtifactUnavailable, match="not looked for in time"):
            presence.size(digest)


class TestShared:
    """Several registrars: what one condemns, the others don't know."""

    @pytest.fixture
    def presence(self, bucket: Bucket) -> Presence:
        store = ObjectStore(bucket.url, endpoint=bucket.proxy.endpoint, region=REGION, now=bucket.clock)
        return Presence(store, shared=True)

    def test_what_is_young_is_never_swept_and_may_be_remembered(self, bucket: Bucket, presence: Presence) -> None:
        digest = bucket.put(b"adapter")
        bucket.clock.ahead_s = 900.0
        assert total(presence.sweep_by_folder(Sweeping(), 1.0)).removed == 0
        presence.look(digest)
        asked = bucket.proxy.count("HEAD")
        assert presence.size(digest) == len(b"adapter")
        assert bucket.proxy.count("HEAD") == asked

    def test_what_another_has_swept_is_forgotten(self, bucket: Bucket, presence: Presence) -> None:
        digest = bucket.put(b"adapter")
        bucket.clock.ahead_s = HOUR_S
        assert presence.look(digest) == len(b"adapter")
        total(bucket.presence.sweep_by_folder(Sweeping(), 1800.0))
        presence.forget([digest])
        with pytest.raises(ArtifactUnavailable, match="not looked for in time"):
            presence.size(digest)


class TestRegistrar:
    @pytest.fixture
    def registrar(self, bucket: Bucket) -> Iterator[RegistrarProcess]:
        with tempfile.TemporaryDirectory(prefix="roost-") as folder:
            location = StoreLocation(bucket.url, endpoint=bucket.proxy.endpoint, region=REGION)
            process = RegistrarProcess(Path(folder), location=location)
            process.start()
            yield process
            process.close()

    async def test_it_names_what_is_in_the_bucket_and_nothing_else(
        self, bucket: Bucket, registrar: RegistrarProcess
    ) -> None:
        client = RegistrarClient(registrar.endpoint)
        await client.run(add_base())
        with bucket.store.writer() as writer:
            writer.write(b"adapter")
            facts = facts_of(writer.commit())
        publish = PublishRevision(policy="acme/bot", artifact=facts, create_over=BASE)
        done = await client.run(publish)
        assert isinstance(done, Committed)
        assert (done.revision, done.changed) == (1, True)
        bucket.put(b"orphan")
        missing = facts_of(Stored("0" * 64, 7))
        with pytest.raises(ArtifactUnavailable, match="upload it first"):
            await client.run(PublishRevision(policy="acme/bot", artifact=missing))
        await asyncio.sleep(1.1)
        collected = await client.run(CollectOrphans(older_than_s=1.0))
        assert collected.removed == 1  # type: ignore[union-attr]
        assert bucket.objects() == {bucket.store.key(facts.digest)}
        client.close()

    async def test_it_looks_for_all_that_a_command_names(self, bucket: Bucket, registrar: RegistrarProcess) -> None:
        client = RegistrarClient(registrar.endpoint)
        await client.run(add_base())
        facts = []
        for number in range(40):
            with bucket.store.writer() as writer:
                writer.write(b"adapter %d" % number)
                facts.append(facts_of(writer.commit()))
        bucket.proxy.inject(delay(0.1), method="HEAD")
        revisions = tuple(ImportedRevision(policy="acme/bot", base=BASE, artifact=artifact) for artifact in facts)
        started = time.monotonic()
        assert (await client.run(ImportRevisions(revisions=revisions))).count == 40  # type: ignore[union-attr]
        assert time.monotonic() - started < 2.0
        await client.run(RetireRevision(policy="acme/bot", revision=7))
        restored = await client.run(RestoreRevision(policy="acme/bot", revision=7))
        assert restored.digest == facts[6].digest  # type: ignore[union-attr]
        client.close()

    async def test_a_slow_store_holds_up_nobody_else(self, bucket: Bucket, registrar: RegistrarProcess) -> None:
        client = RegistrarClient(registrar.endpoint)
        await client.run(add_base())
        with bucket.store.writer() as writer:
            writer.write(b"adapter")
            facts = facts_of(writer.commit())
        bucket.proxy.inject(delay(1.0), method="HEAD")
        started = time.monotonic()
        slow = asyncio.create_task(client.run(PublishRevision(policy="acme/bot", artifact=facts, create_over=BASE)))
        await asyncio.sleep(0.1)
        for number in range(20):
            await client.run(CreatePolicy(policy=f"acme/p{number}", base=BASE))
        assert time.monotonic() - started < 0.8
        assert not slow.done()
        await slow
        client.close()

    async def test_a_store_that_is_gone_refuses_publishes_alone(
        self, bucket: Bucket, registrar: RegistrarProcess
    ) -> None:
        client = RegistrarClient(registrar.endpoint)
        await client.run(add_base())
        digest = blake3(b"adapter").hexdigest()
        bucket.proxy.inject(answer(503, "SlowDown"))
        with pytest.raises(ArtifactUnavailable, match="too busy") as told:
            await client.run(PublishRevision(policy="acme/bot", artifact=facts_of(Stored(digest, 7)), create_over=BASE))
        assert told.value.retry_after_s is not None
        assert isinstance(await client.run(CreatePolicy(policy="acme/other", base=BASE)), Committed)
        client.close()
