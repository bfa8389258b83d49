"""The engine's view of a segment: read-only, checked by record, and let go when the name stands for another file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from backends.arena.segment import OutOfReach, Segments, StaleExtent
from backends.extent_path import ExtentPath
from backends.vllm.arena.cpu import CpuWriter
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

    def unmapped(self, segment: memoryview, close: Callable[[], None]) -> None:
        self.mappings.remove(bytes(segment[HEADER_BYTES : HEADER_BYTES + 5]))
        close()


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
    with pytest.raises(StaleExtent, match="beyond the segment's 65536 bytes"):
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


def test_an_old_segment_is_let_go_without_an_install(tmp_path: Path) -> None:
    arena, watcher = _arena(tmp_path, b"bytes"), Watcher()
    segments = Segments(watcher, root=tmp_path)
    segments.get(NAME)
    segments.drop_old()
    assert watcher.mappings == [b"bytes"]
    arena.close()
    segments.drop_old()
    assert watcher.mappings == []
    assert str(tmp_path / NAME) not in Path("/proc/self/maps").read_text()


def test_only_a_file_is_mapped(tmp_path: Path) -> None:
    """And a pipe that nobody writes to is not waited for."""
    segments = Segments(CpuWriter(), root=tmp_path)
    (tmp_path / "secret").write_bytes(b"0" * 4096)
    (tmp_path / "roost-link").symlink_to(tmp_path / "secret")
    (tmp_path / "roost-folder").mkdir()
    (tmp_path / "roost-empty").touch()
    os.mkfifo(tmp_path / "roost-pipe")
    for name in ("roost-link", "roost-folder", "roost-empty", "roost-pipe"):
        with pytest.raises((OSError, RuntimeError), match=name) as error:
            segments.get(name)
        assert not isinstance(error.value, OutOfReach), "it may be a file the next time"


def test_what_is_not_there_or_not_ours_is_out_of_reach(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = Segments(CpuWriter(), root=tmp_path)
    with pytest.raises(OutOfReach, match="roost-none: No such file"):
        segments.get("roost-none")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OutOfReach, match="belongs to another user"):
        segments.get(NAME)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM])
def test_what_passes_is_not_out_of_reach(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    segments = Segments(CpuWriter(), root=tmp_path)

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        with pytest.raises(OSError, match=os.strerror(code)):
            segments.get(NAME)
    assert bytes(segments.get(NAME).data(PATH)) == b"bytes"
