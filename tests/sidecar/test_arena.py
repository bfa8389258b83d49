"""The segment: private, fresh, its extents known by generation, and a full host an error instead of a death."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.arena import Arena, SegmentLost, segment_name
from sidecar.extents import HEADER_BYTES, Extent
from wire.outcomes import ArtifactUnavailable, StorageFull

DIGEST = "ab" * 32


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena("segment", 1 << 16, root=tmp_path)
    yield arena
    arena.close()


def put(arena: Arena, extent: Extent, data: bytes) -> None:
    with arena.begin(extent) as view:
        view[:] = data
    arena.seal(extent, DIGEST)


def test_what_was_sealed_can_be_read_and_not_written(arena: Arena) -> None:
    extent = Extent(HEADER_BYTES, 5, 1)
    put(arena, extent, b"bytes")
    with arena.read(extent) as view:
        assert bytes(view) == b"bytes"
        assert view.readonly


@pytest.mark.parametrize("given_away", ["cleared", "reused", "never sealed"])
def test_extent_that_was_given_away_is_not_read(arena: Arena, given_away: str) -> None:
    extent = Extent(HEADER_BYTES, 5, 1)
    if given_away == "never sealed":
        arena.begin(extent).release()
    else:
        put(arena, extent, b"first")
        arena.clear(extent)
    if given_away == "reused":
        put(arena, Extent(HEADER_BYTES, 5, 2), b"other")
    with pytest.raises(ArtifactUnavailable, match="given away"):
        arena.read(extent)


def test_record_lies_before_the_data_for_engines_that_map_the_segment(arena: Arena) -> None:
    put(arena, Extent(4096 + HEADER_BYTES, 5, 7), b"bytes")
    record = arena.path.read_bytes()[4096 : 4096 + HEADER_BYTES + 5]
    assert record.startswith(b"roostext" + (7).to_bytes(8, "little") + (5).to_bytes(8, "little"))
    assert bytes.fromhex(DIGEST) in record
    assert record.endswith(b"bytes")


def test_segment_is_private_and_fresh_and_gone_after_a_clean_end(tmp_path: Path) -> None:
    left_over = tmp_path / "segment"
    left_over.write_bytes(b"of a life before")
    with left_over.open("rb") as mapped:
        arena = Arena("segment", 1 << 16, root=tmp_path)
        assert mapped.read() == b"of a life before", "whoever has it mapped keeps what it has"
    assert stat.S_IMODE(arena.path.stat().st_mode) == 0o600
    assert arena.path.read_bytes() == bytes(1 << 16)
    view = arena.begin(Extent(HEADER_BYTES, 5, 1))
    arena.close()
    assert not arena.path.exists()
    view.release()


def test_segment_that_is_as_it_was_made_is_no_trouble(arena: Arena) -> None:
    put(arena, Extent(HEADER_BYTES, 5, 1), b"bytes")
    arena.check()


@pytest.mark.parametrize("what", ["removed", "replaced", "shorter", "longer"])
def test_segment_that_somebody_else_changed_is_known_as_lost(arena: Arena, what: str) -> None:
    if what in ("removed", "replaced"):
        arena.path.unlink()
    if what == "replaced":
        arena.path.write_bytes(bytes(1 << 16))
    if what in ("shorter", "longer"):
        os.truncate(arena.path, 4096 if what == "shorter" else 1 << 20)
    with pytest.raises(SegmentLost, match=str(arena.path)):
        arena.check()


def test_host_without_memory_is_an_error_of_one_fetch(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFull, match="no memory"):
        arena.begin(Extent(HEADER_BYTES, 5, 1))


def test_segments_of_two_deployments_do_not_meet() -> None:
    names = {segment_name("n1", "/a/run"), segment_name("n1", "/b/run"), segment_name("n2", "/a/run")}
    assert len(names) == 3
    assert segment_name("n1", "/a/run") == segment_name("n1", "/a/run")
