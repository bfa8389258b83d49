"""One small base and one ordinary adapter of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from packer.shape import BaseShape
from tests.packer.adapters import config_for, packed, shape_of, tensors_for, write_folder


@pytest.fixture(scope="session")
def shape() -> BaseShape:
    return shape_of()


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory, shape: BaseShape) -> Path:
    """A PEFT folder that nothing is wrong with. Not to be changed."""
    return write_folder(tmp_path_factory.mktemp("adapter") / "a", tensors_for(shape), config_for())


@pytest.fixture(scope="session")
def revision(adapter: Path, shape: BaseShape) -> bytes:
    return packed(adapter, shape)
