"""The engine's view of a segment: read-only, checked by record, and let go when the name stands for another file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from backends.vllm.arena.cpu import CpuWriter
from backends.vllm.arena.segment import OutOfReach, Segments, StaleExtent
from backends.vllm.extent_path import ExtentPath
from sidecar.arena import Arena
from sidecar.extents import HEADER_BYTES, Extent

NAME = "roost-node-0"
DIGEST = "ab" * 32
PATH = ExtentPath(NAME, HEADER_BYTES, 5, 1, DIGEST)


class Watcher(CpuWriter):
    """Notes which mappings it was told of, by the first bytes that were in them."""

    def __init__(self) -> None:
        self.mappings: list[bytes] = []

    def mapped(self, segment: memoryview) -> None:
        assert segment.readonly
        self.mappings.append(bytes(segment[HEADER_BYTES : HEADER_BYTES + 5]))

    def unmapped(self, segment: memoryview) -> None:
        self.mappings.remove(bytes(segment[HEADER_BYTES : HEADER_BYTES + 5]))


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    yield (arena := _arena(tmp_path, b"bytes"))
    arena.close()


def _arena(root: Path, data: bytes, size: int = 1 << 16) -> Arena:
    arena = Arena(NAME, size, root=root)
    extent = Extent(HEADER_BYTES, len(data), 1)
    arena.begin(extent)[:] = data
    arena.seal(extent, DIGEST)
    return arena


def test_an_extent_is_read_where_it_lies(arena: Arena, tmp_path: Path) -> None:
    watcher = Watcher()
    segments = Segments(watcher, root=tmp_path)
    segment = segments.get(NAME)
    segment.check(PATH)
    assert bytes(segment.data(PATH)) == b"bytes"
    assert segments.get(NAME) is segment
    assert watcher.mappings == [b"bytes"]


@pytest.mark.parametrize(
    "change", [{"generation": 2}, {"length": 4}, {"digest": "cd" * 32}, {"offset": 4096 + HEADER_BYTES}]
)
def test_another_extent_is_stale(arena: Arena, tmp_path: Path, change: dict[str, int | str]) -> None:
    segment = Segments(CpuWriter(), root=tmp_path).get(NAME)
    with pytest.raises(StaleExtent, match="was given away"):
        segment.check(msgspec.structs.replace(PATH, **change))


def test_an_extent_that_was_given_away_is_stale(arena: Arena, tmp_path: Path) -> None:
    segment = Segments(CpuWriter(), root=tmp_path).get(NAME)
    segment.check(PATH)
    arena.clear(Extent(PATH.offset, PATH.length, PATH.generation))
    with pytest.raises(StaleExtent):
        segment.check(PATH)


@pytest.mark.parametrize("change", [{"offset": 1 << 16}, {"length": 1 << 16}, {"offset": (1 << 16) - 4}])
def test_nothing_is_read_beyond_the_segment(arena: Arena, tmp_path: Path, change: dict[str, int]) -> None:
    segment = Segments(CpuWriter(), root=tmp_path).get(NAME)
    with pytest.raises(ValueError, match="beyond the segment's 65536 bytes"):
        segment.check(msgspec.structs.replace(PATH, **change))


def test_a_segment_made_anew_is_mapped_anew_and_the_old_one_let_go(arena: Arena, tmp_path: Path) -> None:
    watcher = Watcher()
    segments = Segments(watcher, root=tmp_path)
    old = segments.get(NAME)
    other = _arena(tmp_path, b"other")
    with pytest.raises(StaleExtent, match="given up"):
        old.check(PATH)
    segment = segments.get(NAME)
    assert bytes(segment.data(PATH)) == b"other"
    assert watcher.mappings == [b"other"]
    maps = Path("/proc/self/maps").read_text()
    assert maps.count(str(tmp_path / NAME) + " (deleted)") == 1, "the first sidecar's own mapping alone"
    other.close()


def test_only_a_file_of_ours_is_mapped(tmp_path: Path) -> None:
    segments = Segments(CpuWriter(), root=tmp_path)
    (tmp_path / "secret").write_bytes(b"0" * 4096)
    (tmp_path / "roost-link").symlink_to(tmp_path / "secret")
    (tmp_path / "roost-folder").mkdir()
    (tmp_path / "roost-empty").touch()
    os.mkfifo(tmp_path / "roost-pipe")
    for name in ("roost-link", "roost-folder", "roost-empty", "roost-none"):
        with pytest.raises(OutOfReach, match=name):
            segments.get(name)
