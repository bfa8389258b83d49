from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.blobs import BlobStore, Stored
from tests.catalog.harness import Clock, Sweeping
from wire.outcomes import ArtifactUnavailable, InvalidRequest, StorageFull

HOUR_S = 3600.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> BlobStore:
    return BlobStore(tmp_path / "store", now=clock)


def put(store: BlobStore, content: bytes) -> str:
    with store.writer() as writer:
        writer.write(content)
        return writer.commit().digest


def files(store: BlobStore) -> list[Path]:
    return [path for path in store.root.rglob("*") if path.is_file()]


@settings(deadline=None)
@given(chunks=st.lists(st.binary(max_size=300), max_size=8))
def test_what_is_written_is_found_by_its_digest(tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]) -> None:
    store = BlobStore(tmp_path_factory.mktemp("store"))
    content = b"".join(chunks)
    with store.writer() as writer:
        for chunk in chunks:
            writer.write(chunk)
        stored = writer.commit(blake3(content).hexdigest())
    assert (stored.digest, stored.size) == (blake3(content).hexdigest(), len(content))
    assert store.path(stored.digest).read_bytes() == content
    assert store.size(stored.digest) == len(content)
    store.verify(stored.digest)
    assert files(store) == [store.path(stored.digest)]


def test_takes_any_view_of_bytes(store: BlobStore) -> None:
    with store.writer() as writer:
        writer.write(bytearray(b"ab"))
        writer.write(memoryview(b"__cd__")[2:4])
        writer.write(memoryview(b"\1\0\2\0").cast("H"))
        digest = writer.commit().digest
    assert store.path(digest).read_bytes() == b"abcd\1\0\2\0"


def test_a_blob_can_be_read_and_not_written(store: BlobStore) -> None:
    path = store.path(put(store, b"adapter"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert stat.S_IMODE(store.root.joinpath("blobs").stat().st_mode) == 0o700


def test_bytes_of_another_digest_are_refused_and_leave_nothing(store: BlobStore) -> None:
    with store.writer() as writer, pytest.raises(ArtifactUnavailable, match="as announced"):
        writer.write(b"something else")
        writer.commit(blake3(b"adapter").hexdigest())
    assert files(store) == []


@pytest.mark.parametrize(
    "digest",
    ["", "..", "../../etc/passwd", "/etc/passwd", "0" * 63, "0" * 65, "A" * 64, "0" * 63 + "\n", "\u0660" * 64],
)
def test_only_a_digest_names_a_file(store: BlobStore, digest: str) -> None:
    for ask in (store.path, store.size, store.verify):
        with pytest.raises(InvalidRequest):
            ask(digest)
    with store.writer() as writer, pytest.raises(InvalidRequest):
        writer.commit(digest)
    assert files(store) == []


def test_an_abandoned_upload_leaves_nothing(store: BlobStore) -> None:
    with pytest.raises(KeyError), store.writer() as writer:
        writer.write(b"half")
        raise KeyError("the client went away")
    assert files(store) == []


def test_what_is_not_there_has_no_size(store: BlobStore) -> None:
    assert store.size("0" * 64) is None
    with pytest.raises(ArtifactUnavailable, match="can't be read"):
        store.verify("0" * 64)


def test_all_blobs_are_listed_the_one_modified_first_first(store: BlobStore) -> None:
    digests = [put(store, content) for content in (b"one", b"three", b"fourteen")]
    for digest, at in zip(digests, (30, 10, 20), strict=True):
        os.utime(store.path(digest), (at, at))
    (store.path(digests[0]).parent / "notes.txt").write_text("no blob")
    assert store.stored() == [Stored(digests[1], 5), Stored(digests[2], 8), Stored(digests[0], 3)]


def test_what_was_removed_is_gone_and_may_be_removed_again(store: BlobStore) -> None:
    digest = put(store, b"one")
    store.remove(digest)
    store.remove(digest)
    assert store.size(digest) is None
    with pytest.raises(InvalidRequest):
        store.remove("../partial")


def test_verify_notices_a_changed_byte_and_an_upload_mends_it(store: BlobStore) -> None:
    digest = put(store, b"adapter")
    path = store.path(digest)
    path.chmod(0o644)
    path.write_bytes(b"adaptor")
    with pytest.raises(ArtifactUnavailable, match="corrupt"):
        store.verify(digest)
    assert put(store, b"adapter") == digest
    store.verify(digest)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_full_disk_is_told_as_such_and_leaves_nothing(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    def full(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with store.writer() as writer:
        if call == "rename":
            writer.write(b"adapter")
            monkeypatch.setattr(Path, "rename", full)
        else:
            monkeypatch.setattr(os, call, full)
        with pytest.raises(StorageFull):
            writer.write(b"adapter")
            writer.commit()
    assert files(store) == []


def test_a_write_that_the_disk_takes_in_pieces_is_whole(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:3]))
    digest = put(store, b"an adapter in pieces")
    assert store.path(digest).read_bytes() == b"an adapter in pieces"


def test_another_error_of_the_disk_is_not_called_full(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with store.writer() as writer, pytest.raises(ArtifactUnavailable, match="Input/output error"):
        monkeypatch.setattr(os, "write", broken)
        writer.write(b"adapter")


def test_bytes_are_durable_before_their_name_and_the_name_before_the_answer(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(fd: int) -> None:
        order.append(f"fsync {'folder' if stat.S_ISDIR(os.fstat(fd).st_mode) else 'file'}")
        real_fsync(fd)

    def rename(path: Path, target: Path) -> Path:
        order.append("rename")
        return real_rename(path, target)

    with store.writer() as writer:
        writer.write(b"adapter")
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "rename", rename)
        writer.commit()
    # the first folder is the one that got a new folder for the digest's first digits
    assert order == ["fsync file", "fsync folder", "rename", "fsync folder"]


class TestSweep:
    def test_removes_what_is_old_and_named_by_nobody(self, store: BlobStore, clock: Clock) -> None:
        named, orphan = put(store, b"named"), put(store, b"orphan")
        clock.ahead_s = 2 * HOUR_S
        swept = store.sweep(Sweeping(named), HOUR_S)
        assert (swept.removed, swept.bytes) == (1, len(b"orphan"))
        assert store.size(orphan) is None
        assert files(store) == [store.path(named)]

    def test_leaves_what_is_young(self, store: BlobStore) -> None:
        digest = put(store, b"just uploaded")
        assert store.sweep(Sweeping(), HOUR_S).removed == 0
        assert store.size(digest) is not None

    def test_an_upload_of_what_is_there_already_makes_it_young_again(self, store: BlobStore, clock: Clock) -> None:
        digest = put(store, b"orphan")
        os.utime(store.path(digest), (1.0, 1.0))
        assert put(store, b"orphan") == digest
        assert store.sweep(Sweeping(), HOUR_S).removed == 0
        assert store.size(digest) is not None

    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_an_upload_that_comes_while_the_same_blob_is_removed_survives(
        self, store: BlobStore, monkeypatch: pytest.MonkeyPatch, moment: str
    ) -> None:
        """The sweep has read the old age; the upload is placed just before or just after its next step."""
        digest = put(store, b"orphan")
        os.utime(store.path(digest), (1.0, 1.0))
        real_rename = Path.rename

        def rename(path: Path, target: Path) -> Path:
            if path != store.path(digest):
                return real_rename(path, target)
            monkeypatch.setattr(Path, "rename", real_rename)
            if moment == "before":
                put(store, b"orphan")
            moved = real_rename(path, target)
            if moment == "after":
                put(store, b"orphan")
            return moved

        monkeypatch.setattr(Path, "rename", rename)
        store.sweep(Sweeping(), HOUR_S)
        store.verify(digest)
        assert files(store) == [store.path(digest)]

    def test_removes_partial_files_of_the_dead_and_not_of_the_slow(self, store: BlobStore, clock: Clock) -> None:
        dead = store.root / "partial" / "0123"
        dead.write_bytes(b"half")
        with store.writer() as slow:
            slow.write(b"slow ")
            clock.ahead_s = 2 * HOUR_S
            swept = store.sweep(Sweeping(), HOUR_S)
            assert (swept.removed, swept.bytes) == (1, 4)
            slow.write(b"upload")
            digest = slow.commit().digest
        assert store.path(digest).read_bytes() == b"slow upload"

    def test_leaves_files_that_are_not_its_own(self, store: BlobStore, clock: Clock) -> None:
        put(store, b"orphan")
        stranger = next(store.root.joinpath("blobs").iterdir()) / "README"
        stranger.write_text("not a blob")
        clock.ahead_s = 2 * HOUR_S
        store.sweep(Sweeping(), HOUR_S)
        assert files(store) == [stranger]
