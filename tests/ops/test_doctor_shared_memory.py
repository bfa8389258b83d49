"""What ``roost doctor`` says of shared memory where a mesh runs already."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from ops.cli.doctor import Grade, check_shared_memory
from ops.config import RoostConfig
from ops.layout import Layout
from sidecar.arena import Arena, segment_name
from sidecar.extents import HEADER_BYTES, Extent

SIZE = 8 << 20


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


@pytest.fixture
def config() -> RoostConfig:
    config = RoostConfig()
    return msgspec.structs.replace(config, node=msgspec.structs.replace(config.node, arena_bytes=SIZE))


@pytest.fixture
def arena(layout: Layout, config: RoostConfig) -> Iterator[Arena]:
    yield (arena := Arena(segment_name(config.node.name, str(layout.run)), SIZE))
    arena.close()


def test_what_the_running_arena_has_taken_is_there_for_it(
    layout: Layout, config: RoostConfig, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=SIZE // 2))
    assert check_shared_memory(config, layout).grade is Grade.FAIL
    arena.begin(Extent(HEADER_BYTES, SIZE // 2, 1))
    assert check_shared_memory(config, layout).grade is Grade.OK
