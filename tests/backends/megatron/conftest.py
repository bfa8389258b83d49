"""Bases that all tests of the trainer share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.megatron.bases import KINDS, make_base


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By kind: a tiny random checkpoint."""
    folder = tmp_path_factory.mktemp("bases")
    return {kind: make_base(folder / kind, kind) for kind in KINDS}
