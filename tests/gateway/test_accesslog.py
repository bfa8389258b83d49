from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from gateway.accesslog import AccessLog, AccessRecord, write_to
from gateway.trace import request_id


def record(number: int) -> AccessRecord:
    return AccessRecord(at=1.5, request_id=f"r{number}", route="chat", outcome="ok", status=200, total_ms=2.5)


async def test_records_are_written_soon_and_in_batches() -> None:
    batches: asyncio.Queue[bytes] = asyncio.Queue()
    log = AccessLog(batches.put_nowait, asyncio.get_running_loop())
    for number in range(10):
        log.add(record(number))
    assert batches.empty()
    lines = [json.loads(line) for line in (await batches.get()).splitlines()]
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
    assert batches
    log.flush()
    assert len(b"".join(batches).splitlines()) == 4000


async def test_a_flush_writes_what_is_left_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    log = AccessLog(write_to(descriptor), asyncio.get_running_loop())
    log.add(record(1))
    log.flush()
    log.flush()
    os.close(descriptor)
    assert len(path.read_bytes().splitlines()) == 1


async def test_a_log_that_cannot_be_written_stops_no_request() -> None:
    def full(batch: bytes) -> None:
        raise OSError("no space left")

    log = AccessLog(full, asyncio.get_running_loop())
    for number in range(4000):
        log.add(record(number))
    log.flush()


def test_a_sane_request_id_is_kept_and_any_other_replaced() -> None:
    assert request_id(b"abc-123:4_5.6") == b"abc-123:4_5.6"
    for bad in (None, b"", b"a b", b"x" * 129, b"a\r\nb", b"\xff", b"-leading"):
        made = request_id(bad)
        assert made != bad
        assert len(made) == 24
        assert made != request_id(bad)
