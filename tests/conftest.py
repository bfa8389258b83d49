"""Shared by all tests: what a run left out is said at its end, never passed over in silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from loadtest.postgres import PostgresServer, running_server
from tests.object_storage import SECRET, FaultyProxy, ObjectServer, faulty_proxy, object_server

# how long an example takes is the machine's affair, and no property of the code
settings.register_profile("roost", deadline=None)
settings.load_profile("roost")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what did not run here, and how to run it."""
    left_out: list[str] = []
    deselected = terminalreporter.stats.get("deselected", [])
    soak = [item for item in deselected if item.get_closest_marker("soak") is not None]
    engine = [item for item in deselected if item not in soak and item.get_closest_marker("engine") is not None]
    if soak:
        left_out.append(f"{len(soak)} test(s) with full counts: make soak")
    if engine:
        left_out.append(f"{len(engine)} test(s) with a real engine: make test")
    if not Path("/dev/nvidia0").exists():
        left_out.append("engines on CUDA: this machine has no GPU")
    if left_out:
        terminalreporter.section("not run here")
        for line in left_out:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def s3() -> Iterator[ObjectServer]:
    """One S3-speaking server for the whole run; each test takes a bucket of its own."""
    with object_server() as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real server, shared by the tests that don't end it."""
    with running_server() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server of the test's own, to be ended."""
    with running_server() as server:
        yield server


@pytest.fixture
def proxy(s3: ObjectServer) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3) as proxy:
        yield proxy


@pytest.fixture
def s3_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials, where the product looks for them: in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
