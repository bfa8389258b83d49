"""Reading an object: ranges in parallel, hashed in order as they arrive in the caller's memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

import obstore
from blake3 import blake3

from wire.outcomes import ArtifactUnavailable

from .faults import told
from .location import Handle

# large enough that a request's latency does not count, small enough for a failure to cost little
PIECE_BYTES = 8 << 20
# pieces asked for at a time: what a read holds beside the caller's memory
_PIECES_IN_FLIGHT = 6
_LOOK_EVERY_S = 0.05


class ObjectSource:
    """An artifact that is there. ``size`` in bytes, as the store tells it."""

    def __init__(self, handle: Handle, key: str, digest: str, size: int) -> None:
        self._handle = handle
        self._key = key
        self._digest = digest
        self.size = size

    def fill(self, view: memoryview, given_up: Callable[[], bool]) -> str | None:
        """Fill ``view`` (``size`` bytes) and return the digest of what is in it then; None if it was given up.

        Once it returns or raises, nothing is written to ``view`` any more. Raises ArtifactUnavailable.
        """
        with told(f"read artifact {self._digest}"):
            return asyncio.run(self._fill(view, given_up))

    async def _fill(self, view: memoryview, given_up: Callable[[], bool]) -> str | None:
        """On a loop of this thread's own: only here can a request under way be dropped."""
        hasher = blake3()
        starts = iter(range(0, len(view), PIECE_BYTES))
        asked: deque[tuple[int, asyncio.Future[obstore.Bytes]]] = deque()
        self._ask(starts, asked, len(view))
        try:
            while asked:
                start, piece = asked[0]
                await asyncio.wait([piece], timeout=_LOOK_EVERY_S)
                if given_up():
                    return None
                if not piece.done():
                    continue
                asked.popleft()
                with view[start : min(start + PIECE_BYTES, len(view))] as part:
                    self._place(piece.result(), part)
                    hasher.update(part)
                self._ask(starts, asked, len(view))
        finally:
            for _, piece in asked:
                piece.cancel()
            if asked:
                await asyncio.wait([piece for _, piece in asked])
        return hasher.hexdigest()

    def _ask(self, starts: Iterator[int], asked: deque[tuple[int, asyncio.Future[obstore.Bytes]]], size: int) -> None:
        while len(asked) < _PIECES_IN_FLIGHT and (start := next(starts, None)) is not None:
            end = min(start + PIECE_BYTES, size)
            piece = asyncio.ensure_future(self._get(start, end))
            asked.append((start, piece))

    async def _get(self, start: int, end: int) -> obstore.Bytes:
        return await obstore.get_range_async(self._handle, self._key, start=start, end=end)

    def _place(self, data: obstore.Bytes, part: memoryview) -> None:
        with memoryview(data) as arrived:
            if len(arrived) != len(part):
                raise ArtifactUnavailable(f"artifact {self._digest} is shorter in the store than the store says")
            part[:] = arrived
