"""The disk tier: copies that are right or not there, within their budget, whatever happens to the disk or to us."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blake3 import blake3
from msgspec import structs

from catalog.artifacts import StoreLocation
from catalog.objects.store import ObjectStore
from sidecar.arena import Arena
from sidecar.disk import DiskTier, open_tier
from sidecar.extents import HEADER_BYTES, Extent
from sidecar.fetch import Fetcher
from sidecar.policies.lru import Lru
from sidecar.service import open_storage
from tests.object_storage import REGION, FaultyProxy, ObjectServer, answer
from tests.sidecar.bench import settings
from tests.sidecar.conftest import Gateway, Store, config, running, until
from tests.sidecar.fake_engine import FakeBackend
from wire.events import ArtifactsRemoved, Event
from wire.node import Granted, Refused
from wire.outcomes import ArtifactUnavailable
from wire.sockets import FeedPublisher

ROOT = Path(__file__).parents[2]
SIZE = 10_000
BLOCK = 12_288
BUDGET = 3 * SIZE


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena("segment", 64 * BLOCK, root=tmp_path)
    yield arena
    arena.close()


@pytest.fixture
def tier(tmp_path: Path, arena: Arena) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path / "tier", BUDGET, arena, Lru())
    yield tier
    tier.close()


def data(number: int, size: int = SIZE) -> bytes:
    return bytes([number]) * size


def digest(number: int, size: int = SIZE) -> str:
    return blake3(data(number, size)).hexdigest()


def place(arena: Arena, number: int, size: int = SIZE) -> Extent:
    extent = Extent(HEADER_BYTES + number * BLOCK, size, number + 1)
    with arena.begin(extent) as view:
        view[:] = data(number, size)
    arena.seal(extent, digest(number, size))
    return extent


def keep(tier: DiskTier, arena: Arena, *numbers: int) -> None:
    for number in numbers:
        tier.arrived(digest(number), place(arena, number))
        tier.wait()


def kept(tier: DiskTier, *numbers: int) -> list[int]:
    return [number for number in numbers if digest(number) in tier]


def read(tier: DiskTier, number: int) -> bytes | None:
    with tier.open(digest(number)) as source:
        if source is None:
            return None
        view = memoryview(bytearray(source.size))
        assert source.fill(view, lambda: False) == digest(number)
        return bytes(view)


def blob(tier_folder: Path, number: int) -> Path:
    return tier_folder / "tier" / "blobs" / digest(number)[:2] / digest(number)


def test_what_arrived_can_be_read_again(tier: DiskTier, arena: Arena) -> None:
    keep(tier, arena, 1)
    assert read(tier, 1) == data(1)
    assert read(tier, 2) is None
    assert tier.used == SIZE


def test_the_least_recently_used_leaves_its_file_too(tier: DiskTier, arena: Arena, tmp_path: Path) -> None:
    keep(tier, arena, 1, 2, 3)
    read(tier, 1)
    keep(tier, arena, 4)
    assert kept(tier, 1, 2, 3, 4) == [1, 3, 4]
    assert not blob(tmp_path, 2).exists()
    assert tier.used == 3 * SIZE


def test_larger_than_the_budget_is_not_kept(tier: DiskTier, arena: Arena) -> None:
    keep(tier, arena, 1)
    extent = Extent(HEADER_BYTES + 10 * BLOCK, BUDGET + 1, 11)
    with arena.begin(extent) as view:
        view[:] = data(9, BUDGET + 1)
    arena.seal(extent, digest(9, BUDGET + 1))
    tier.arrived(digest(9, BUDGET + 1), extent)
    tier.wait()
    assert (tier.used, kept(tier, 1)) == (SIZE, [1])


def test_one_that_leaves_while_it_is_looked_for_is_not_there(
    tier: DiskTier, arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep(tier, arena, 1)
    open_file = os.open

    def overtaken(path: Path, *arguments: int) -> int:
        monkeypatch.setattr(os, "open", open_file)
        tier.distrust(digest(1))
        return open_file(path, *arguments)

    monkeypatch.setattr(os, "open", overtaken)
    assert read(tier, 1) is None
    assert caplog.records == []


def test_dropped_copies_are_gone_also_one_that_is_about_to_be_written(
    tier: DiskTier, arena: Arena, tmp_path: Path
) -> None:
    keep(tier, arena, 1)
    tier.arrived(digest(2), place(arena, 2))
    for number in (1, 2, 3):
        tier.drop(digest(number))
    tier.wait()
    assert (tier.used, kept(tier, 1, 2, 3)) == (0, [])
    assert not blob(tmp_path, 1).exists()
    assert not blob(tmp_path, 2).exists()


def test_next_life_knows_what_was_used_last(arena: Arena, tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "tier", BUDGET, arena, Lru())
    keep(tier, arena, 1, 2, 3)
    for number, at in ((1, 100), (2, 50), (3, 200)):
        os.utime(blob(tmp_path, number), (at, at))
    read(tier, 2)
    tier.close()
    smaller = DiskTier(tmp_path / "tier", 2 * SIZE + 1, arena, Lru())
    assert kept(smaller, 1, 2, 3) == [2, 3]
    assert not blob(tmp_path, 1).exists()
    smaller.close()


def test_evicted_before_its_turn_is_not_kept(tier: DiskTier, arena: Arena) -> None:
    extent = place(arena, 1)
    arena.clear(extent)
    tier.arrived(digest(1), extent)
    tier.wait()
    assert (tier.used, kept(tier, 1)) == (0, [])


def test_evicted_while_it_is_written_is_not_kept_and_no_fault(
    tier: DiskTier, arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others' bytes come into the extent under the writer's eyes."""
    extent = place(arena, 1)
    write = os.write

    def overtaken(file: int, part: memoryview) -> int:
        with arena.begin(extent) as view:
            view[:] = data(2)
        monkeypatch.setattr(os, "write", write)
        return write(file, part)

    monkeypatch.setattr(os, "write", overtaken)
    monkeypatch.setattr("sidecar.disk._WRITE_BYTES", 4096)
    tier.arrived(digest(1), extent)
    tier.wait()
    assert (tier.used, kept(tier, 1)) == (0, [])
    assert list((tmp_path / "tier" / "partial").iterdir()) == []
    assert caplog.records == []
    keep(tier, arena, 3)
    assert kept(tier, 3) == [3]


@pytest.mark.parametrize("refusal", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_disk_that_refuses_is_told_once_and_tried_again_later(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: int
) -> None:
    clock = [0.0]
    tier = DiskTier(tmp_path / "tier", BUDGET, arena, Lru(), now=lambda: clock[0])
    keep(tier, arena, 1)
    write, tries = os.write, []

    def refuse(file: int, part: memoryview) -> int:
        tries.append(len(part))
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "write", refuse)
    keep(tier, arena, 2, 3)
    assert len(tries) == 1, "not tried for each"
    clock[0] = 3600.0
    keep(tier, arena, 2)
    assert len(tries) == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert os.strerror(refusal) in caplog.text
    assert read(tier, 1) == data(1), "what is there serves on"
    assert (tier.used, list((tmp_path / "tier" / "partial").iterdir())) == (SIZE, [])
    monkeypatch.setattr(os, "write", write)
    keep(tier, arena, 2)
    assert kept(tier, 2) == []
    clock[0] = 7200.0
    keep(tier, arena, 2)
    assert kept(tier, 2) == [2]
    tier.close()


def test_what_can_not_be_removed_still_counts(tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    tier = DiskTier(tmp_path / "tier", BUDGET, arena, Lru(), now=lambda: clock[0])
    keep(tier, arena, 1, 2, 3)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == digest(2):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    large = Extent(HEADER_BYTES + 10 * BLOCK, BUDGET, 11)
    with arena.begin(large) as view:
        view[:] = data(9, BUDGET)
    arena.seal(large, digest(9, BUDGET))
    tier.arrived(digest(9, BUDGET), large)
    tier.wait()
    assert kept(tier, 1, 2, 3) == [2, 3]
    assert tier.used == 2 * SIZE
    assert read(tier, 3) == data(3)
    monkeypatch.setattr(Path, "unlink", unlink)
    clock[0] = 3600.0
    keep(tier, arena, 4, 5)
    assert tier.used == BUDGET
    assert sum(file.stat().st_size for file in (tmp_path / "tier" / "blobs").rglob("*") if file.is_file()) == BUDGET
    tier.close()


def test_second_sidecar_gets_no_tier_in_the_same_folder(
    tier: DiskTier, arena: Arena, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(tier, arena, 1)
    assert open_tier(tmp_path / "tier", BUDGET, arena, Lru()) is None
    assert "another process has" in caplog.text
    assert read(tier, 1) == data(1)


def test_folder_that_can_not_be_made_is_no_tier(arena: Arena, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    assert open_tier(tmp_path / "file" / "tier", BUDGET, arena, Lru()) is None
    assert "no revisions are kept" in caplog.text


def test_strangers_in_the_folder_are_neither_served_nor_counted(arena: Arena, tmp_path: Path) -> None:
    blob(tmp_path, 1).parent.mkdir(parents=True)
    secret = tmp_path / "secret"
    secret.write_bytes(data(1))
    blob(tmp_path, 1).symlink_to(secret)
    (blob(tmp_path, 1).parent / "notes.txt").write_text("mine")
    (tmp_path / "tier" / "partial").mkdir()
    (tmp_path / "tier" / "partial" / "left").write_bytes(data(2))
    tier = DiskTier(tmp_path / "tier", BUDGET, arena, Lru())
    assert (tier.used, read(tier, 1)) == (0, None)
    assert not (tmp_path / "tier" / "partial" / "left").exists()
    keep(tier, arena, 1)
    assert read(tier, 1) == data(1)
    assert (secret.read_bytes(), blob(tmp_path, 1).is_symlink()) == (data(1), False)
    tier.close()


def test_killed_at_any_system_call_it_leaves_whole_copies_within_the_budget(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.sidecar.disk_crash", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["wrong"] == []
    assert found["kills"] > 50
    assert found["last"] == 0


def test_a_full_disk_is_no_tier_for_a_while_and_no_failed_load(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    mount = 'mount -t tmpfs -o size=1m none "$1/small" && exec "$2" -m tests.sidecar.disk_full "$1"'
    ended = subprocess.run(
        [*namespace, "sh", "-c", mount, "sh", str(tmp_path), sys.executable],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {
        "when_full": 0,
        "warnings_when_full": 1,
        "while_it_pauses": 0,
        "with_room": 4,
        "beside_others": 5,
        "warnings": 1,
        "partial": 0,
    }


class TestBeforeAnObjectStore:
    """A real server that speaks S3: what it is asked for, and what is not asked of it any more."""

    @pytest.fixture
    def bucket(self, s3: ObjectServer, proxy: FaultyProxy, s3_keys: None) -> ObjectStore:
        return ObjectStore(f"s3://{s3.new_bucket()}/p", endpoint=proxy.endpoint, region=REGION)

    @pytest.fixture
    def fetcher(self, bucket: ObjectStore, arena: Arena, tmp_path: Path) -> Iterator[Callable[[], Fetcher]]:
        made: list[Fetcher] = []

        def make() -> Fetcher:
            """The fetcher of another life of the sidecar."""
            for former in made:
                former.close()
            made[:] = [Fetcher(bucket, arena, workers=1, timeout_s=20.0, nearer=[self.tier(arena, tmp_path)])]
            return made[0]

        yield make
        made[0].close()

    def tier(self, arena: Arena, tmp_path: Path) -> DiskTier:
        self.present = DiskTier(tmp_path / "tier", BUDGET, arena, Lru())
        return self.present

    def put(self, bucket: ObjectStore, number: int) -> None:
        with bucket.writer() as writer:
            writer.write(data(number))
            writer.commit()

    async def fetch(self, fetcher: Fetcher, arena: Arena, number: int, generation: int) -> None:
        extent = Extent(HEADER_BYTES + number * BLOCK, SIZE, generation)
        await fetcher.fetch(digest(number), extent, pytest.fail)
        with arena.read(extent) as view:
            assert view == data(number)
        self.present.wait()

    async def test_second_fetch_asks_the_disk_also_in_another_life(
        self, bucket: ObjectStore, proxy: FaultyProxy, arena: Arena, fetcher: Callable[[], Fetcher]
    ) -> None:
        self.put(bucket, 1)
        first = fetcher()
        await self.fetch(first, arena, 1, 1)
        proxy.heal()
        await self.fetch(first, arena, 1, 2)
        await self.fetch(fetcher(), arena, 1, 3)
        assert proxy.seen == []

    async def test_disk_serves_while_the_store_does_not(
        self, bucket: ObjectStore, proxy: FaultyProxy, arena: Arena, fetcher: Callable[[], Fetcher]
    ) -> None:
        self.put(bucket, 1)
        self.put(bucket, 2)
        first = fetcher()
        await self.fetch(first, arena, 1, 1)
        proxy.inject(answer(403, "AccessDenied"))
        await self.fetch(first, arena, 1, 2)
        with pytest.raises(ArtifactUnavailable):
            await self.fetch(first, arena, 2, 3)

    @pytest.mark.parametrize("damage", ["flipped", "cut", "grown", "gone", "another", "a folder"])
    async def test_damaged_copy_is_never_served_and_is_replaced(
        self,
        bucket: ObjectStore,
        proxy: FaultyProxy,
        arena: Arena,
        fetcher: Callable[[], Fetcher],
        tmp_path: Path,
        damage: str,
    ) -> None:
        self.put(bucket, 1)
        first = fetcher()
        await self.fetch(first, arena, 1, 1)
        path = blob(tmp_path, 1)
        path.parent.chmod(0o700)
        path.unlink()
        if damage == "a folder":
            path.mkdir()
        elif damage != "gone":
            right = data(1)
            wrong = {"flipped": right[:-1] + b"\0", "cut": right[:-1], "grown": right + b"\0", "another": data(2)}
            path.write_bytes(wrong[damage])
        proxy.heal()
        await self.fetch(first, arena, 1, 2)
        assert proxy.count("GET") == 1
        if damage == "a folder":
            return
        await self.fetch(first, arena, 1, 3)
        assert proxy.count("GET") == 1, "kept again"
        assert path.read_bytes() == data(1)

    async def test_a_node_answers_from_its_disk(
        self, bucket: ObjectStore, proxy: FaultyProxy, sockets: Path, store: Store, tmp_path: Path
    ) -> None:
        location = StoreLocation(bucket.url, proxy.endpoint, REGION)
        feed = f"ipc://{sockets}/registrar-feed"
        registrar: FeedPublisher[Event] = FeedPublisher(feed, Event, epoch=1, heartbeat_s=0.05)
        node = structs.replace(
            config(sockets, store), store=location, disk_dir=str(tmp_path / "tier"), registrar_feed=feed
        )
        self.put(bucket, 1)
        self.put(bucket, 2)
        gateway = Gateway(node)
        async with running(node, FakeBackend()):
            assert isinstance(await gateway.ask(digest(1), SIZE), Granted)
            await until(blob(tmp_path, 1).exists)
        gateway.close()
        proxy.inject(answer(503, "ServiceUnavailable"))
        gateway = Gateway(node)
        async with running(node, FakeBackend()):
            assert isinstance(await gateway.ask(digest(1), SIZE), Granted)
            while blob(tmp_path, 1).exists():
                registrar.publish(Event(seq=1, at_ms=0, actor="test", body=ArtifactsRemoved(digests=(digest(1),))))
                await asyncio.sleep(0.05)
            refused = await gateway.ask(digest(2), SIZE, timeout_s=60.0)
            assert isinstance(refused, Refused)
        gateway.close()
        registrar.close()


@pytest.mark.parametrize("changes", [{}, {"store": StoreLocation("file:///nowhere")}, {"disk_bytes": 0}])
def test_no_tier_where_the_store_is_a_folder_or_none_is_wanted(tmp_path: Path, changes: dict[str, object]) -> None:
    if "store" in changes:
        changes = {"store": StoreLocation(f"file://{tmp_path}/elsewhere")}
    elif changes:
        changes = {**changes, "store": StoreLocation("s3://bucket/p", "http://127.0.0.1:1", REGION)}
    node = settings(
        **{
            "store_dir": str(tmp_path / "store"),
            "run_dir": str(tmp_path),
            "disk_dir": str(tmp_path / "tier"),
            **changes,
        }
    )
    storage = open_storage(node)
    storage.fetcher.close()
    storage.arena.close()
    assert not (tmp_path / "tier").exists()
