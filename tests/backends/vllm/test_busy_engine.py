"""An engine's process that says nothing: at work, asleep, or gone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from backends import engine_server, pulse
from backends.engine_client import Unreachable
from backends.interface import Health
from backends.process import Command
from backends.procfs import read_stat
from backends.pulse import Pulse
from backends.vllm import driver
from backends.vllm.client import VllmClient
from backends.vllm.driver import VllmBackend
from tests.backends.support import tiny_settings, until_dead, until_ready

# answers one request at a time, and nobody while it burns or sleeps
SERVER = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        until = time.monotonic() + 60
        while self.path == "/burn" and time.monotonic() < until:
            pass
        if self.path == "/sleep":
            time.sleep(60)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


@pytest.fixture
async def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VllmBackend]:
    monkeypatch.setattr(driver, "command_for", lambda _: Command((sys.executable, "-c", SERVER), {}))
    monkeypatch.setattr(engine_server, "HEALTH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(engine_server, "SILENCE_S", 3.0)
    monkeypatch.setattr(pulse, "SPAN_S", 0.5)
    backend = VllmBackend(tiny_settings(tmp_path), run_dir=tmp_path / "run", log_dir=tmp_path / "log")
    await backend.start()
    try:
        await until_ready(backend, 30)
        yield backend
    finally:
        await backend.stop()


def _wait_for_end(pid: int) -> None:
    while (stat := read_stat(pid)) is not None and stat.alive:
        time.sleep(0.01)


async def _get(backend: VllmBackend, path: str) -> None:
    host, port = backend.address()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.5)) as session:
        with pytest.raises(TimeoutError):
            await session.get(f"http://{host}:{port}{path}")


async def _health_until(backend: VllmBackend, done: Callable[[], bool]) -> None:
    while not done():
        assert await backend.health() is Health.READY
        await asyncio.sleep(0.05)


async def test_a_server_at_work_is_not_dead_for_a_long_time(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _get(backend, "/burn")
    began = time.monotonic()
    await _health_until(backend, lambda: time.monotonic() - began > 2 * engine_server.SILENCE_S)
    assert backend.detail.startswith("busy: silent for")
    monkeypatch.setattr(engine_server, "BUSY_SILENCE_S", 1.0)
    assert await backend.health() is Health.DEAD
    assert backend.detail.startswith("silent for")


async def test_a_silent_server_that_does_nothing_is_dead_soon(backend: VllmBackend) -> None:
    await _get(backend, "/sleep")
    assert await until_dead(backend, 20) < 10
    assert backend.detail.startswith("silent for")


async def test_a_process_that_ends_between_two_looks_is_told_as_ended(
    backend: VllmBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(_: VllmClient, timeout_s: float) -> bool:
        assert backend.pid is not None
        os.kill(backend.pid, signal.SIGKILL)
        await asyncio.to_thread(_wait_for_end, backend.pid)
        raise Unreachable("nobody answers")

    monkeypatch.setattr(VllmClient, "health", gone)
    assert await backend.health() is Health.DEAD
    assert "process ended" in backend.detail


def test_work_is_judged_by_its_share_of_each_span() -> None:
    watched = Pulse(100.0, 5.0)
    watched.feel(100.0 + pulse.SPAN_S / 2, 9.0)
    assert watched.worked_at is None, "too short to judge"
    watched.feel(100.0 + pulse.SPAN_S, 5.0 + pulse.WORKING_SHARE * pulse.SPAN_S)
    assert watched.worked_at == 100.0 + pulse.SPAN_S
    watched.feel(110.0, 5.6)
    assert watched.worked_at == 100.0 + pulse.SPAN_S
