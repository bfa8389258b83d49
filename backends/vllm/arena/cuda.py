"""Slots on a CUDA device: a transfer of the extent's bytes on a stream of its own, and one kernel that spreads them.

The model's stream is not touched: steps go on meanwhile. A revision larger than the staging buffer goes through it in
pieces, each transferred and scattered before the next, in the stream's order.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from backends.arena.cache import LruCache

from .pinned import PinnedMapping, copy_to_device
from .plan import Move, Plan, Source, Switch
from .scatter import Blocks, cut, scatter, set_switches

logger = logging.getLogger(__name__)

# a rank-1 adapter of every expert of a 30B model is 106 MB, and goes in one piece
STAGING_BYTES = 128 << 20
BOUNCE_BYTES = 16 << 20
# up to 13 MB each, of memory that vLLM has not counted
_MAX_DEVICE_PLANS = 8


class DevicePiece(NamedTuple):
    """A piece of a plan: which bytes of the data it reads, from which element on, and its blocks."""

    start: int
    offset: int
    size: int
    blocks: Blocks


class DevicePlan(NamedTuple):
    """What the kernel reads of a plan, on the device."""

    table: torch.Tensor
    pieces: tuple[DevicePiece, ...]
    switches: torch.Tensor
    values: torch.Tensor


class CudaWriter:
    """Writes slots of one CUDA device. Made in the worker's main thread, before steps run: it compiles its kernels."""

    def __init__(self, device: torch.device, *, dtype: torch.dtype, staging_bytes: int = STAGING_BYTES) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._mappings: dict[int, PinnedMapping] = {}
        self._plans: LruCache[Plan, DevicePlan] = LruCache(_MAX_DEVICE_PLANS)
        self._staging = self._allocate(staging_bytes)
        self._scales = np.ones(1, np.float32)
        self._device_scales = torch.ones(1, device=device)
        self._bounce = _Bounce(self._stream)
        self._last: CudaWrite | None = None
        for source_dtype in (torch.bfloat16, torch.float32):
            self._warm_up(dtype, source_dtype)

    def mapped(self, segment: memoryview) -> None:
        """Start to register a segment's mapping as pinned; what is not yet, or can't be, goes through a buffer."""
        address = _address(segment)
        try:
            self._mappings[address] = PinnedMapping(address, segment.nbytes)
        except (OSError, RuntimeError) as error:
            logger.warning("the arena can't be pinned, its bytes are copied on the way to the device: %s", error)

    def unmapped(self, segment: memoryview, close: Callable[[], None]) -> None:
        """Wait for writes under way, and leave the rest to the mapping's thread."""
        self._feed_last()
        # a device that is lost tells so of writes
        with contextlib.suppress(RuntimeError):
            self._stream.synchronize()
        mapping = self._mappings.pop(_address(segment), None)
        if mapping is None:
            close()
        else:
            mapping.release(close)

    def wait_until_pinned(self) -> None:
        """Wait until all that can be pinned is."""
        for mapping in self._mappings.values():
            mapping.wait()

    def write(self, plan: Plan, data: memoryview, slot: int, scales: npt.NDArray[np.float32]) -> CudaWrite:
        """Start to write; see ``SlotWriter.write``."""
        self._feed_last()
        device_plan = self._on_device(plan)
        queued = torch.cuda.current_stream(self._device).record_event()
        self._last = CudaWrite(self._steps(plan, device_plan, _address(data), slot, scales, queued), self._stream)
        self._last.advance()
        return self._last

    def _on_device(self, plan: Plan) -> DevicePlan:
        return self._plans.get(plan, lambda: self._upload(plan))

    def _feed_last(self) -> None:
        """Let a write that still has to be fed from the host end: the staging buffer is one.

        That it fails is told to whoever asks for it, which nobody does here.
        """
        if self._last is not None:
            with contextlib.suppress(RuntimeError):
                self._last.feed()

    def _steps(
        self,
        plan: Plan,
        device_plan: DevicePlan,
        address: int,
        slot: int,
        scales: npt.NDArray[np.float32],
        queued: torch.cuda.Event,
    ) -> Iterator[None]:
        """Queue all work on our stream; yields where the host must wait before it can go on."""
        with torch.cuda.stream(self._stream):
            device_scales = self._upload_scales(scales)
        for number, piece in enumerate(device_plan.pieces):
            yield from self._transfer(address + piece.offset, piece.size)
            with torch.cuda.stream(self._stream):
                if number == 0:
                    # what is queued on the model's stream may still read the slot for its former adapter
                    self._stream.wait_event(queued)
                    set_switches(device_plan.switches, device_plan.values, slot)
                staging = self._staging[: piece.size].view(plan.source_dtype)
                scatter(device_plan.table, piece.blocks, staging, piece.start, device_scales, slot, plan.dtype)

    def _transfer(self, address: int, size: int) -> Iterator[None]:
        if size > self._staging.numel():
            self._staging = self._allocate(size)
        target = self._staging.data_ptr()
        mapping = next((one for one in self._mappings.values() if one.has(address, size)), None)
        if mapping is None or not mapping.pinned(address, size):
            yield from self._bounce.transfer(target, address, size)
            return
        for part, length in mapping.parts(address, size):
            copy_to_device(target + part - address, part, length, self._stream.cuda_stream)

    def _upload_scales(self, scales: npt.NDArray[np.float32]) -> torch.Tensor:
        if scales.size and not np.array_equal(scales, self._scales):
            self._scales = scales.copy()
            self._device_scales = self._to_device(self._scales)
        return self._device_scales

    def _upload(self, plan: Plan) -> DevicePlan:
        item = plan.source_dtype.itemsize
        with torch.cuda.stream(self._stream):
            pieces = tuple(
                DevicePiece(
                    piece.start,
                    piece.start * item,
                    (piece.end - piece.start) * item,
                    Blocks(self._to_device(piece.moves), self._to_device(piece.firsts)),
                )
                for piece in cut(plan.table, self._staging.numel() // item)
            )
            return DevicePlan(
                self._to_device(plan.table),
                pieces,
                self._to_device(np.array([one.tensor.data_ptr() for one in plan.switches], np.int64)),
                self._to_device(np.array([one.value for one in plan.switches], np.int32)),
            )

    def _to_device(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        # pinned, since a copy from other memory would wait for what is on the stream
        return torch.from_numpy(np.array(values)).pin_memory().to(self._device, non_blocking=True)

    def _allocate(self, size: int) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _warm_up(self, dtype: torch.dtype, source_dtype: torch.dtype) -> None:
        """Compile the kernels, which takes a second, on a slot of their own."""
        with torch.cuda.stream(self._stream):
            tile = torch.empty(1, 1, 1, 1, dtype=dtype, device=self._device)
            place = torch.empty(1, dtype=torch.int32, device=self._device)
        data = np.ones(1, np.float32)
        plan = Plan.of(
            [Move(tile, Source(0, 1, 1, 1, 1, 0))], [Switch(place, 1)],
            source_dtype=source_dtype, data_bytes=source_dtype.itemsize,
        )  # fmt: skip
        self.write(plan, data.data.cast("B")[: plan.data_bytes], 0, np.ones(1, np.float32)).wait()


class CudaWrite:
    """A write on its way: ``feed`` has the host's part of it done, the device's part ends with an event.

    One that failed stays so: every call tells it again, and nothing of it is queued any more.
    """

    def __init__(self, steps: Iterator[None], stream: torch.cuda.Stream) -> None:
        self._steps: Iterator[None] | None = steps
        self._stream = stream
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._failure = ""

    def advance(self) -> None:
        """Queue as much as can be without waiting. Raises RuntimeError."""
        if self._failure:
            raise RuntimeError(self._failure)
        if self._steps is None:
            return
        try:
            if next(self._steps, self) is self:
                self._event.record(self._stream)
                self._steps = None
        except Exception as error:
            self._fail(error)
            raise RuntimeError(self._failure) from error

    def _fail(self, error: Exception) -> None:
        """What was queued goes to a slot that is about to be free: return when it is over."""
        self._failure, self._steps = str(error) or type(error).__name__, None
        # a stream that can't be waited for is of a device that does nothing any more
        with contextlib.suppress(RuntimeError):
            self._stream.synchronize()

    def feed(self) -> None:
        """Return when everything is queued. Raises RuntimeError."""
        self.advance()
        while self._steps is not None:
            self.advance()

    def done(self) -> bool:
        """Whether everything is written; never waits longer than a copy of BOUNCE_BYTES in the host's memory takes.

        Raises RuntimeError.
        """
        self.advance()
        return self._steps is None and bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Return when everything is written. Raises RuntimeError."""
        self.feed()
        self._event.synchronize()


class _Bounce:
    """For bytes that are not pinned: a pinned buffer, half of which is filled while the other half is transferred."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._buffer: torch.Tensor | None = None
        self._free = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def transfer(self, target: int, address: int, size: int) -> Iterator[None]:
        """Copy to the device; yields after every half, and while the next half is not free."""
        if self._buffer is None:
            self._buffer = torch.empty(BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True)
        half = BOUNCE_BYTES // 2
        for number, start in enumerate(range(0, size, half)):
            length = min(half, size - start)
            free = self._free[number % 2]
            while not free.query():  # type: ignore[no-untyped-call]
                yield
            place = self._buffer.data_ptr() + number % 2 * half
            ctypes.memmove(place, address + start, length)
            copy_to_device(target + start, place, length, self._stream.cuda_stream)
            free.record(self._stream)
            yield


def _address(bytes_: memoryview) -> int:
    return int(np.frombuffer(bytes_, np.uint8).__array_interface__["data"][0])
