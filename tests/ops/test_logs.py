from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ops.supervise import logs
from ops.supervise.logs import keep_bounded, rotate

WRITER = "import itertools, sys\nfor number in itertools.count(): sys.stdout.write(f'{number}\\n')"


def test_the_log_of_a_process_that_writes_and_writes_stays_bounded(tmp_path: Path) -> None:
    log = tmp_path / "busy.log"
    with log.open("ab") as output:
        writer = subprocess.Popen([sys.executable, "-c", WRITER], stdout=output)
    try:
        rotations = 0
        deadline = time.monotonic() + 30
        while rotations < 3:
            assert time.monotonic() < deadline, "it never grew past its bound"
            rotations += len(rotate(tmp_path, 1 << 20))
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
    # written for appending: what comes after is at the start of the emptied file, with no hole before it
    assert b"\0" not in log.read_bytes()
    assert b"\0" not in log.with_suffix(".log.1").read_bytes()


async def test_logs_are_looked_at_now_and_then(tmp_path: Path) -> None:
    looking = asyncio.create_task(keep_bounded(tmp_path, kept_bytes=10, every_s=0.01))
    for _ in range(2):
        (tmp_path / "gateway.log").write_bytes(b"x" * 11)
        async with asyncio.timeout(10):
            while (tmp_path / "gateway.log").stat().st_size:
                assert not looking.done()
                await asyncio.sleep(0.02)
    looking.cancel()


def test_a_small_log_is_left_alone_and_a_large_one_kept_once(tmp_path: Path) -> None:
    (tmp_path / "small.log").write_bytes(b"x" * 10)
    (tmp_path / "engine-e.log").write_bytes(b"y" * 11)
    assert rotate(tmp_path, 10) == ["engine-e.log"]
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == {
        "small.log": 10, "engine-e.log": 0, "engine-e.log.1": 11,
    }  # fmt: skip


def test_without_room_for_a_copy_the_log_is_bounded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(logs.shutil, "copyfileobj", full)
    (tmp_path / "gateway.log").write_bytes(b"x" * 11)
    assert rotate(tmp_path, 10) == ["gateway.log"]
    assert [file.stat().st_size for file in tmp_path.iterdir()] == [0]
