"""Fetches: verified on arrival, given up in time, and never writing after they have ended."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from catalog.artifacts import ArtifactSource
from catalog.objects.download import PIECE_BYTES
from catalog.objects.store import ObjectStore
from sidecar.arena import Arena
from sidecar.extents import HEADER_BYTES, Extent
from sidecar.fetch import Fetcher
from tests.object_storage import REGION, FaultyProxy, ObjectServer, answer, corrupt, delay
from tests.sidecar.conftest import Store
from wire.outcomes import ArtifactUnavailable, DeadlinePassed, StorageFull

DATA = os.urandom(10_000)


def never(message: str) -> None:
    pytest.fail(message)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena("segment", 1 << 20, root=tmp_path)
    yield arena
    arena.close()


@pytest.fixture
def fetcher(store: Store, arena: Arena) -> Iterator[Fetcher]:
    fetcher = Fetcher(store.blobs, arena, workers=1, timeout_s=20.0)
    yield fetcher
    fetcher.close()


@pytest.fixture
def hasty(store: Store, arena: Arena) -> Iterator[Fetcher]:
    fetcher = Fetcher(store.blobs, arena, workers=1, timeout_s=0.1)
    yield fetcher
    fetcher.close()


async def test_bytes_arrive_and_are_sealed(store: Store, arena: Arena, fetcher: Fetcher) -> None:
    extent = Extent(HEADER_BYTES, len(DATA), 1)
    await fetcher.fetch(store.put(DATA), extent, never)
    with arena.read(extent) as view:
        assert bytes(view) == DATA


async def test_artifact_of_another_size_never_touches_the_arena(store: Store, arena: Arena, fetcher: Fetcher) -> None:
    with pytest.raises(ArtifactUnavailable, match="has 10000 bytes in the store, not 9999"):
        await fetcher.fetch(store.put(DATA), Extent(HEADER_BYTES, len(DATA) - 1, 1), never)
    assert arena.path.read_bytes() == bytes(1 << 20)


async def test_corrupt_bytes_are_never_sealed(store: Store, arena: Arena, fetcher: Fetcher) -> None:
    digest = store.put(DATA)
    path = store.blobs.path(digest)
    path.chmod(0o600)
    path.write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    extent = Extent(HEADER_BYTES, len(DATA), 1)
    with pytest.raises(ArtifactUnavailable, match="corrupt"):
        await fetcher.fetch(digest, extent, never)
    with pytest.raises(ArtifactUnavailable):
        arena.read(extent)


async def test_host_without_memory_is_storage_full(
    store: Store, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = store.put(DATA)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFull):
        await fetcher.fetch(digest, Extent(HEADER_BYTES, len(DATA), 1), never)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_slow_fetch_is_given_up_only_when_its_thread_has_stopped(
    store: Store, hasty: Fetcher, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    digest = store.put(DATA)
    reading, go_on, reads = threading.Event(), threading.Event(), []
    readv = os.readv

    def slow(file: int, buffers: list[memoryview]) -> int:
        reading.set()
        go_on.wait(20.0)
        reads.append(readv(file, [buffers[0][:10]]))
        return reads[-1]

    monkeypatch.setattr(os, "readv", slow)
    told: list[str] = []
    fetch = asyncio.create_task(hasty.fetch(digest, Extent(HEADER_BYTES, len(DATA), 1), told.append))
    await asyncio.to_thread(reading.wait, 20.0)
    if cancelled:
        fetch.cancel()
    await asyncio.sleep(0.3)
    assert not fetch.done(), "the thread may still write"
    assert len(told) == 1, "also of a fetch that nobody needs: others may wait for its extent"
    go_on.set()
    with pytest.raises(asyncio.CancelledError if cancelled else DeadlinePassed):
        await fetch
    assert reads == [10]


class Near:
    """A source that has everything, and gives nothing before it is let go."""

    name = "near"

    def __init__(self, store: Store) -> None:
        self.asked: list[str] = []
        self.let_go = threading.Event()
        self._store = store

    @contextlib.contextmanager
    def open(self, digest: str) -> Iterator[ArtifactSource | None]:
        self.asked.append(digest)
        self.let_go.wait(20.0)
        with self._store.blobs.open(digest) as source:
            yield source

    def distrust(self, digest: str) -> None:
        pytest.fail("what it gave was right")

    def arrived(self, digest: str, extent: Extent) -> None:
        """Not of interest here."""

    def close(self) -> None:
        """Nothing is open."""


async def test_a_source_that_hangs_is_passed_over_until_it_lets_go(store: Store, arena: Arena) -> None:
    near = Near(store)
    fetcher = Fetcher(store.blobs, arena, workers=1, timeout_s=2.0, nearer=[near])
    digests = [store.put(DATA + bytes([number])) for number in range(3)]
    extents = [Extent(HEADER_BYTES + number * 20_480, len(DATA) + 1, number + 1) for number in range(3)]
    overdue = asyncio.Event()
    hanging = asyncio.create_task(fetcher.fetch(digests[0], extents[0], lambda message: overdue.set()))
    await overdue.wait()
    await fetcher.fetch(digests[1], extents[1], never)
    assert near.asked == [digests[0]]
    near.let_go.set()
    with pytest.raises(DeadlinePassed):
        await hanging
    await fetcher.fetch(digests[2], extents[2], never)
    assert near.asked == [digests[0], digests[2]]
    fetcher.close()


class TestObjectStore:
    """The same from an object store: straight into the arena, in pieces."""

    LARGE = os.urandom(3 * PIECE_BYTES + 5)

    @pytest.fixture
    def arena(self, tmp_path: Path) -> Iterator[Arena]:
        arena = Arena("segment", 64 << 20, root=tmp_path)
        yield arena
        arena.close()

    @pytest.fixture
    def bucket(self, s3: ObjectServer, proxy: FaultyProxy, s3_keys: None) -> ObjectStore:
        return ObjectStore(f"s3://{s3.new_bucket()}/p", endpoint=proxy.endpoint, region=REGION)

    @pytest.fixture
    def fetcher(self, bucket: ObjectStore, arena: Arena) -> Iterator[Fetcher]:
        fetcher = Fetcher(bucket, arena, workers=1, timeout_s=120.0)
        yield fetcher
        fetcher.close()

    @pytest.fixture
    def hasty(self, bucket: ObjectStore, arena: Arena) -> Iterator[Fetcher]:
        fetcher = Fetcher(bucket, arena, workers=1, timeout_s=1.0)
        yield fetcher
        fetcher.close()

    def put(self, bucket: ObjectStore, data: bytes) -> str:
        with bucket.writer() as writer:
            writer.write(data)
            return writer.commit().digest

    async def test_bytes_arrive_and_are_sealed(self, bucket: ObjectStore, arena: Arena, fetcher: Fetcher) -> None:
        extent = Extent(HEADER_BYTES, len(self.LARGE), 1)
        await fetcher.fetch(self.put(bucket, self.LARGE), extent, never)
        with arena.read(extent) as view:
            assert bytes(view) == self.LARGE

    async def test_artifact_of_another_size_never_touches_the_arena(
        self, bucket: ObjectStore, arena: Arena, fetcher: Fetcher
    ) -> None:
        with pytest.raises(ArtifactUnavailable, match="has 10000 bytes in the store, not 9999"):
            await fetcher.fetch(self.put(bucket, DATA), Extent(HEADER_BYTES, len(DATA) - 1, 1), never)
        assert arena.path.stat().st_blocks == 0

    async def test_corrupt_bytes_are_never_sealed(
        self, bucket: ObjectStore, arena: Arena, fetcher: Fetcher, proxy: FaultyProxy
    ) -> None:
        digest = self.put(bucket, self.LARGE)
        extent = Extent(HEADER_BYTES, len(self.LARGE), 1)
        proxy.inject(corrupt(), method="GET", times=1)
        with pytest.raises(ArtifactUnavailable, match="corrupt"):
            await fetcher.fetch(digest, extent, never)
        with pytest.raises(ArtifactUnavailable):
            arena.read(extent)
        await fetcher.fetch(digest, extent, never)
        with arena.read(extent) as view:
            assert bytes(view) == self.LARGE

    @pytest.mark.parametrize("cancelled", [False, True])
    async def test_slow_fetch_is_given_up_before_storage_answers(
        self, bucket: ObjectStore, hasty: Fetcher, fetcher: Fetcher, proxy: FaultyProxy, cancelled: bool
    ) -> None:
        digest = self.put(bucket, DATA)
        proxy.inject(delay(60.0), method="GET")
        started = time.monotonic()
        told: list[str] = []
        giving_up = fetcher if cancelled else hasty
        fetch = asyncio.create_task(giving_up.fetch(digest, Extent(HEADER_BYTES, len(DATA), 1), told.append))
        if cancelled:
            await asyncio.sleep(0.3)
            fetch.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else DeadlinePassed):
            await fetch
        assert time.monotonic() - started < 50.0
        assert len(told) == (not cancelled)

    async def test_what_the_store_says_is_passed_on(
        self, bucket: ObjectStore, fetcher: Fetcher, proxy: FaultyProxy
    ) -> None:
        extent = Extent(HEADER_BYTES, len(DATA), 1)
        with pytest.raises(ArtifactUnavailable, match="no such object"):
            await fetcher.fetch("0" * 64, extent, never)
        proxy.inject(answer(403, "AccessDenied"))
        with pytest.raises(ArtifactUnavailable, match="refuses our credentials"):
            await fetcher.fetch("0" * 64, extent, never)
