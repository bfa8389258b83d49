"""What is no file is never waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packer.folder import read_bounded
from wire.outcomes import ArtifactUnavailable


def test_a_pipe_in_a_file_s_place_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ArtifactUnavailable, match="not a file"):
        read_bounded(tmp_path / "config.json", 100)
