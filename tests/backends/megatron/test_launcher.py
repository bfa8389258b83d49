"""Where ranks listen."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from backends.megatron_train.launcher import _socket_folder


def test_what_a_killed_life_left_goes_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    link = tmp_path / "state" / "sockets"
    killed, others = _socket_folder(link), _socket_folder(tmp_path / "other" / "sockets")
    (killed / "settings.json").touch()
    assert link.resolve() == killed
    following = _socket_folder(link)
    assert (killed.exists(), others.exists(), following.exists()) == (False, True, True)
    assert following.stat().st_mode & 0o777 == 0o700


def test_a_link_to_something_else_costs_nothing_but_itself(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    link = tmp_path / "sockets"
    link.symlink_to(precious)
    _socket_folder(link).rmdir()
    assert precious.is_dir()
