"""Every test of the sockets runs under asyncio's own loop and under uvloop."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for Unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="wire-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def endpoint(folder: Path) -> str:
    return f"ipc://{folder}/sockets/node.sock"
