"""What is asked of CUDA's driver to pin a mapping, and when the mapping may go. Without a device."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.vllm.arena import pinned
from backends.vllm.arena.pinned import PinnedMapping, check_room, parts

CHUNK = 1 << 20


class Driver:
    """Notes the calls; those named in ``failing`` are errors."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.failing: set[str] = set()
        self.threads: set[str] = set()

    def __call__(self, name: str, *arguments: Any) -> None:
        self.threads.add(threading.current_thread().name)
        if name in self.failing:
            raise RuntimeError(f"{name}: CUDA_ERROR_UNKNOWN (999)")
        if name.startswith("cuMemHost"):
            self.calls.append((name.removeprefix("cuMemHost"), arguments[0].value))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(pinned, "_call", driver)
    monkeypatch.setattr(pinned, "_context", lambda: None)
    monkeypatch.setattr(pinned, "CHUNK_BYTES", CHUNK)
    return driver


@pytest.fixture
def mapping(tmp_path: Path) -> Iterator[memoryview]:
    """Three chunks and a bit of a file without any bytes in it yet."""
    path = tmp_path / "segment"
    with path.open("w+b") as file:
        file.truncate(3 * CHUNK + 4096)
        yield memoryview(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ))


def address_of(mapping: memoryview) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def waited(start: Callable[[Callable[[], None]], None]) -> None:
    closed = threading.Event()
    start(closed.set)
    assert closed.wait(10)


def test_a_mapping_is_pinned_chunk_by_chunk_and_let_go_on_a_thread_of_its_own(
    driver: Driver, mapping: memoryview
) -> None:
    address = address_of(mapping)
    pinned_mapping = PinnedMapping(address, mapping.nbytes)
    pinned_mapping.wait()
    assert pinned_mapping.pinned(address, mapping.nbytes)
    chunks = [address + number * CHUNK for number in range(4)]
    assert driver.calls == [("Register_v2", chunk) for chunk in chunks]
    driver.calls.clear()
    waited(pinned_mapping.release)
    assert driver.calls == [("Unregister", chunk) for chunk in chunks]
    assert driver.threads == {"roost-pin"}


@pytest.mark.parametrize("failing", ["cuMemHostRegister_v2", "cuMemHostUnregister", "cuCtxSetCurrent"])
def test_a_mapping_goes_whatever_the_driver_says(driver: Driver, mapping: memoryview, failing: str) -> None:
    driver.failing = {failing}
    address = address_of(mapping)
    pinned_mapping = PinnedMapping(address, mapping.nbytes)
    pinned_mapping.wait()
    assert pinned_mapping.pinned(address, 1) == (failing == "cuMemHostUnregister")
    waited(pinned_mapping.release)


def test_memory_is_left_to_others(driver: Driver, mapping: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> object:
        return SimpleNamespace(f_bavail=257, f_frsize=4096, f_blocks=1024)

    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", full)
        check_room(0, Path("/dev/shm"))
        check_room(129 * 4096, Path("/dev/shm"))
        with pytest.raises(RuntimeError, match="520192 bytes left for others"):
            check_room(130 * 4096, Path("/dev/shm"))
        pinned_mapping = PinnedMapping(address_of(mapping), mapping.nbytes)
        pinned_mapping.wait()
    assert driver.calls == [], "a chunk of a file without bytes would take them all"
    waited(pinned_mapping.release)


@given(
    origin=st.integers(0, 1 << 40),
    start=st.integers(0, 1 << 20),
    size=st.integers(0, 1 << 16),
    chunk=st.integers(256, 9999),
)
def test_parts_are_the_bytes_in_order_and_none_spans_two_chunks(origin: int, start: int, size: int, chunk: int) -> None:
    found = list(parts(origin, origin + start, size, chunk))
    at = origin + start
    for address, length in found:
        assert address == at and length > 0
        assert (address - origin) // chunk == (address + length - 1 - origin) // chunk
        at += length
    assert at == origin + start + size
    assert len(found) <= size // chunk + 2
