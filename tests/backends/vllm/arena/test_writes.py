"""Writes to a device that are fed step by step: one that fails is never taken for done. Without a device."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from backends.vllm.arena import cuda  # noqa: E402
from backends.vllm.arena.cuda import CudaWrite, CudaWriter  # noqa: E402


class Event:
    """As torch's: one that was never recorded says that it is over."""

    def __init__(self) -> None:
        self.recorded = False

    def record(self, stream: Stream) -> None:
        self.recorded = True
        stream.events.append("record")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class Stream:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.lost = False

    def synchronize(self) -> None:
        self.events.append("synchronize")
        if self.lost:
            raise RuntimeError("the device is lost")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    monkeypatch.setattr(cuda.torch.cuda, "Event", Event)
    return Stream()


def steps(count: int, error: Exception | None = None) -> Iterator[None]:
    for _ in range(count):
        yield
    if error is not None:
        raise error


def made(stream: Stream, count: int, error: Exception | None = None) -> CudaWrite:
    return CudaWrite(steps(count, error), stream)  # type: ignore[arg-type]


def test_a_write_is_done_when_it_was_fed_and_its_event_came(stream: Stream) -> None:
    write = made(stream, 2)
    assert [write.done() for _ in range(4)] == [False, False, True, True]
    write.wait()
    assert stream.events == ["record"]


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("first", ["advance", "feed", "done", "wait"])
def test_a_write_that_failed_says_so_every_time(stream: Stream, first: str, lost: bool) -> None:
    stream.lost = lost
    write = made(stream, 0, RuntimeError("the copy failed"))
    with pytest.raises(RuntimeError, match="the copy failed"):
        getattr(write, first)()
    assert stream.events == ["synchronize"], "what was queued before may still write to the slot"
    for ask in (write.done, write.wait, write.feed, write.advance):
        with pytest.raises(RuntimeError, match="the copy failed"):
            ask()


def test_a_failure_of_the_memory_is_one_too(stream: Stream) -> None:
    write = made(stream, 1, MemoryError())
    assert not write.done()
    with pytest.raises(RuntimeError, match="MemoryError"):
        write.done()
    with pytest.raises(RuntimeError, match="MemoryError"):
        write.wait()


def test_a_write_is_not_told_of_another_ones_failure(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = CudaWriter.__new__(CudaWriter)
    writer._device = torch.device("cpu")
    writer._stream = stream  # type: ignore[assignment]
    monkeypatch.setattr(cuda.torch.cuda, "current_stream", lambda _: SimpleNamespace(record_event=lambda: None))
    queue = [steps(2, RuntimeError("the first is broken")), steps(0)]
    monkeypatch.setattr(CudaWriter, "_steps", lambda *_: queue.pop(0))
    monkeypatch.setattr(CudaWriter, "_on_device", lambda *_: None)
    writer._last = None
    none: Any = None
    first = writer.write(none, memoryview(b"1"), 0, none)
    second = writer.write(none, memoryview(b"2"), 1, none)
    assert second.done()
    with pytest.raises(RuntimeError, match="the first is broken"):
        first.done()
    with pytest.raises(RuntimeError, match="the first is broken"):
        first.wait()
