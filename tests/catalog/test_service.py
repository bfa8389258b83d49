"""What every process of the mesh does with its settings, its signals and its errors."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from catalog.service import run_service
from wire.outcomes import InvalidRequest, JournalUnavailable


class Told(msgspec.Struct, forbid_unknown_fields=True):
    word: str


Serve = Callable[[Told, asyncio.Event], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def run(serve: Serve, settings: bytes = b'{"word": "hello"}') -> int:
        path = tmp_path / "settings.json"
        path.write_bytes(settings)
        monkeypatch.setattr(sys, "argv", ["it", "--settings", str(path)])
        return run_service("it", "A test.", Told, serve)

    return run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well(run: Callable[..., int], number: signal.Signals) -> None:
    heard: list[str] = []

    async def serve(told: Told, stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 10)
        heard.append(told.word)

    assert run(serve) == 0
    assert heard == ["hello"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(InvalidRequest("x", field="y"), 2), (JournalUnavailable("gone"), 1), (OSError(98, "Address in use"), 1)],
)
def test_why_it_could_not_serve_is_its_exit_status(run: Callable[..., int], error: Exception, status: int) -> None:
    async def serve(_: Told, __: asyncio.Event) -> None:
        raise error

    assert run(serve) == status


@pytest.mark.parametrize("settings", [b"", b"{", b"{}", b'{"word": 1}', b'{"word": "x", "more": 1}'])
def test_settings_that_can_not_stand_are_told_before_anything_runs(run: Callable[..., int], settings: bytes) -> None:
    async def serve(_: Told, __: asyncio.Event) -> None:
        raise AssertionError("served")

    assert run(serve, settings) == 2


def test_a_fault_of_ours_is_not_hidden(run: Callable[..., int]) -> None:
    async def serve(_: Told, __: asyncio.Event) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(serve)
