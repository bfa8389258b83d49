from __future__ import annotations

import asyncio
import json
import os
import queue
import threading
import time
from pathlib import Path

from gateway.accesslog import AccessLog, AccessRecord, write_to
from gateway.trace import request_id

from .mesh import until


def record(number: int) -> AccessRecord:
    return AccessRecord(at=1.5, request_id=f"r{number}", route="chat", outcome="ok", status=200, total_ms=2.5)


async def test_records_are_written_soon_and_in_batches() -> None:
    batches: queue.Queue[bytes] = queue.Queue()
    log = AccessLog(batches.put, asyncio.get_running_loop())
    for number in range(10):
        log.add(record(number))
    assert batches.empty()
    lines = [json.loads(line) for line in (await asyncio.to_thread(batches.get, timeout=20.0)).splitlines()]
    await log.close()
    assert [line["request_id"] for line in lines] == [f"r{number}" for number in range(10)]
    assert lines[0] == {
        "at": 1.5,
        "request_id": "r0",
        "route": "chat",
        "outcome": "ok",
        "status": 200,
        "total_ms": 2.5,
    }


async def test_many_records_do_not_wait_for_the_timer() -> None:
    batches: list[bytes] = []
    log = AccessLog(batches.append, asyncio.get_running_loop())
    for number in range(4000):
        log.add(record(number))
    await until(lambda: bool(batches))
    await log.close()
    assert len(b"".join(batches).splitlines()) == 4000


async def test_closing_writes_what_is_left_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    log = AccessLog(write_to(descriptor), asyncio.get_running_loop())
    log.add(record(1))
    await log.close()
    os.close(descriptor)
    assert len(path.read_bytes().splitlines()) == 1


async def test_a_log_that_cannot_be_written_stops_no_request() -> None:
    def full(batch: bytes) -> None:
        raise OSError("no space left")

    log = AccessLog(full, asyncio.get_running_loop())
    for number in range(4000):
        log.add(record(number))
    await log.close()
    assert log.dropped == 4000


async def test_a_sink_that_nobody_reads_holds_up_nobody_and_what_is_lost_is_counted() -> None:
    reading, batches = threading.Event(), []

    def stuck(batch: bytes) -> None:
        reading.wait(60.0)
        batches.append(batch)

    log = AccessLog(stuck, asyncio.get_running_loop())
    began = time.monotonic()
    for number in range(100):
        log.add(record(number))
        log.flush()
    await log.close(wait_s=0.05)
    assert time.monotonic() - began < 30.0
    assert 0 < log.dropped < 100
    reading.set()
    await until(lambda: len(batches) == 100 - log.dropped)


def test_a_sane_request_id_is_kept_and_any_other_replaced() -> None:
    assert request_id(b"abc-123:4_5.6") == b"abc-123:4_5.6"
    for bad in (None, b"", b"a b", b"x" * 129, b"a\r\nb", b"\xff", b"-leading"):
        made = request_id(bad)
        assert made != bad
        assert len(made) == 24
        assert made != request_id(bad)
