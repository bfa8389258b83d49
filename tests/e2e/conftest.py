"""What the end-to-end tests share: one tiny base a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import make_tiny_base


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_base(tmp_path_factory.mktemp("base"), arch="qwen3")
