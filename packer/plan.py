"""Which bytes of the sources follow each other in a destination: runs of bytes, and blocks that are turned.

A plan fills any range of its destination on demand, at C speed, and holds no object for a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

# what a copy costs, in nanoseconds: of one run through Python, of one grain through numpy's take
_RUN_NS = 400
_GRAIN_NS = 10


class Segment(Protocol):
    """A part of the destination, ``nbytes`` long."""

    nbytes: int

    def fill(self, start: int, out: Bytes) -> None:
        """Write the part's bytes from ``start`` on into all of ``out``."""

    def name_at(self, position: int) -> str:
        """The tensor that holds the part's byte ``position``."""


class Runs:
    """Byte ranges of ``sources``, one after another; ``names`` says which tensor each is.

    ``which`` tells each range's source where there is more than one.
    """

    def __init__(
        self,
        sources: Sequence[Bytes],
        offsets: Sequence[int] | Integers,
        lengths: Sequence[int] | Integers,
        names: Sequence[str],
        which: Sequence[int] | None = None,
    ) -> None:
        self._sources = sources
        self._offsets = np.asarray(offsets, dtype=np.int64)
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._names = names
        self._which = which
        self._ends = np.cumsum(self._lengths)
        self.nbytes = int(self._ends[-1]) if len(self._ends) else 0

    @property
    def grain(self) -> int:
        """The largest number of bytes that every run is a multiple of."""
        return int(np.gcd.reduce(self._lengths)) if len(self._lengths) else 1

    def name_at(self, position: int) -> str:
        return self._names[int(np.searchsorted(self._ends, position, side="right"))]

    def fill(self, start: int, out: Bytes) -> None:
        end = start + out.size
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        offsets, lengths = self._offsets[first : last + 1].copy(), self._lengths[first : last + 1].copy()
        skipped = start - int(self._ends[first] - self._lengths[first])
        offsets[0] += skipped
        lengths[0] -= skipped
        lengths[-1] -= int(self._ends[last]) - end
        if self._which is not None:
            _copy_runs([self._sources[which] for which in self._which[first : last + 1]], offsets, lengths, out)
            return
        source = self._sources[0]
        base = int(offsets.min())
        grain = int(np.gcd.reduce(np.concatenate((offsets - base, lengths))))
        if out.size // grain * _GRAIN_NS < len(offsets) * _RUN_NS:
            _take_grains(source, base, grain, offsets, lengths, out)
        else:
            _copy_runs([source] * len(offsets), offsets, lengths, out)


def _copy_runs(sources: Sequence[Bytes], offsets: Integers, lengths: Integers, out: Bytes) -> None:
    position = 0
    for source, offset, length in zip(sources, offsets.tolist(), lengths.tolist(), strict=True):
        out[position : position + length] = source[offset : offset + length]
        position += length


def _take_grains(source: Bytes, base: int, grain: int, offsets: Integers, lengths: Integers, out: Bytes) -> None:
    """Copy the runs as pieces of ``grain`` bytes, all of which lie on one grid that begins at ``base``."""
    size = int((offsets + lengths).max()) - base
    item = np.dtype((np.void, grain))
    counts = lengths // grain
    ends = np.cumsum(counts)
    # the first grain of each run, less the number of grains before it in the destination
    shifts = (offsets - base) // grain - (ends - counts)
    indices = np.repeat(shifts, counts)
    indices += np.arange(int(ends[-1]))
    # any mode but "raise" writes straight into ``out``; no index is out of bounds
    source[base : base + size].view(item).take(indices, out=out.view(item), mode="clip")


class Turned:
    """One tensor whose elements stand in another order: ``view`` shows them in the destination's."""

    def __init__(self, view: npt.NDArray[Any], name: str) -> None:
        self._view = view
        self._name = name
        self.nbytes = view.nbytes

    def name_at(self, position: int) -> str:
        return self._name

    def fill(self, start: int, out: Bytes) -> None:
        row_bytes = self.nbytes // len(self._view)
        end = start + out.size
        row = start // row_bytes
        while start < end:
            skipped = start - row * row_bytes
            if skipped or end - start < row_bytes:
                step = min(row_bytes - skipped, end - start)
                whole = np.ascontiguousarray(self._view[row]).reshape(-1).view(np.uint8)
                out[:step] = whole[skipped : skipped + step]
                row += 1
            else:
                rows = (end - start) // row_bytes
                step = rows * row_bytes
                shaped = out[:step].view(self._view.dtype).reshape(rows, *self._view.shape[1:])
                shaped[...] = self._view[row : row + rows]
                row += rows
            start += step
            out = out[step:]


class CopyPlan:
    """Segments that follow each other in the destination."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._ends = np.cumsum([segment.nbytes for segment in segments], dtype=np.int64)
        self.total = int(self._ends[-1]) if segments else 0

    @property
    def grain(self) -> int:
        """What a block's size had best be a multiple of; 1 if nothing is gained by that."""
        first = self._segments[0] if len(self._segments) == 1 else None
        return first.grain if isinstance(first, Runs) else 1

    def name_at(self, position: int) -> str:
        """The tensor that holds the destination's byte ``position``."""
        place = int(np.searchsorted(self._ends, position, side="right"))
        segment = self._segments[place]
        return segment.name_at(position - int(self._ends[place]) + segment.nbytes)

    def fill(self, start: int, out: Bytes) -> None:
        """Write the destination's bytes from ``start`` on into all of ``out``."""
        place = int(np.searchsorted(self._ends, start, side="right"))
        while out.size:
            segment = self._segments[place]
            begun = start - int(self._ends[place]) + segment.nbytes
            step = min(out.size, segment.nbytes - begun)
            segment.fill(begun, out[:step])
            start += step
            out = out[step:]
            place += 1
