"""A mesh that runs detached, without an engine: whichever of its two guardians is killed, it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomli_w

from backends.process import free_port
from ops.layout import Layout
from ops.supervise.state import MeshState, Phase, read_state

ROOT = Path(__file__).parents[2]
PATIENCE_S = 40.0


def _roost(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "ops.cli", "--state-dir", str(folder / "state"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def layout(tmp_path: Path) -> Iterator[Layout]:
    config = tmp_path / "roost.toml"
    config.write_text(
        tomli_w.dumps({"state_dir": str(tmp_path / "state"), "gateway": {"port": free_port("127.0.0.1")}})
    )
    _roost(tmp_path, "up", "--config", str(config), "--detach")
    try:
        yield Layout.of(str(tmp_path / "state"))
    finally:
        _roost(tmp_path, "down")


def _until(layout: Layout, condition: Callable[[MeshState], bool]) -> MeshState:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        state = read_state(layout.state_file)
        if state is not None and condition(state):
            return state
        assert time.monotonic() < deadline, state
        time.sleep(0.05)


def _guarded(state: MeshState) -> bool:
    return state.phase is Phase.READY and state.supervisor.alive and state.keeper is not None and state.keeper.alive


def test_a_killed_keeper_is_replaced_and_its_successor_brings_a_killed_supervisor_back(layout: Layout) -> None:
    first = _until(layout, _guarded)
    assert first.keeper is not None
    os.kill(first.keeper.pid, signal.SIGKILL)
    second = _until(layout, lambda state: _guarded(state) and state.keeper != first.keeper)
    assert second.supervisor == first.supervisor
    os.kill(second.supervisor.pid, signal.SIGKILL)
    third = _until(layout, lambda state: _guarded(state) and state.supervisor != second.supervisor)
    assert third.keeper == second.keeper
