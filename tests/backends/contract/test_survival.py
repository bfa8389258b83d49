"""What becomes of an engine when its driver or a part of it ends: the last of the suite, as each leaves it changed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from backends.interface import Removal
from backends.procfs import session_members
from tests.backends.support import Caller, until_dead, until_ready

from .stage import START_S, Contract

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]


async def test_the_next_driver_adopts_the_engine(stage: Contract, caller: Caller) -> None:
    adapter = await stage.install(1)
    pid = stage.backend.pid
    await stage.backend.detach()
    stage.backend = stage.make_backend()
    await stage.backend.start()
    await until_ready(stage.backend, 20)
    assert stage.backend.pid == pid
    assert await stage.backend.installed() == {adapter}
    assert await caller.complete(adapter) == (200, stage.reference(1))
    other = await stage.install(2)
    assert await caller.complete(other) == (200, stage.reference(2))
    assert await stage.backend.remove(adapter, 10) in {Removal.REMOVED, Removal.FORGOTTEN}


async def _comes_back(stage: Contract, pid: int) -> None:
    assert await until_dead(stage.backend, 20) < 15
    assert stage.backend.detail
    await stage.backend.stop()
    assert session_members(pid) == []
    await stage.backend.start()
    await until_ready(stage.backend, START_S)
    assert await stage.backend.installed() == frozenset()


async def test_a_worker_that_is_killed_is_noticed_and_the_engine_comes_back(stage: Contract) -> None:
    """The largest process besides the server: the one that has the model."""
    await stage.empty()
    await stage.install(1)
    pid = stage.backend.pid
    assert pid is not None
    worker = max((member.pid for member in session_members(pid) if member.pid != pid), key=_resident_pages)
    os.kill(worker, signal.SIGKILL)
    await _comes_back(stage, pid)
    async with stage.called() as caller:
        await stage.check(caller)


async def test_a_server_that_is_killed_takes_its_workers_along(stage: Contract) -> None:
    pid = stage.backend.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert await until_dead(stage.backend, 20) < 15
    assert "process ended" in stage.backend.detail
    await stage.backend.stop()
    assert session_members(pid) == []


def _resident_pages(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
