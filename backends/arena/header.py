"""The layout of a revision, read from its header once: adapters of one rank and the same targets share theirs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from packer.modules import tensor_name
from packer.revision import KEPT_HEADER_BYTES, WHAT, Pair, read_header
from packer.safetensors_header import ITEM_BYTES, MAX_HEADER_BYTES, header_of
from packer.scaling import scale

from .cache import LruCache

_PREFIX_BYTES = 8
# revisions of the adapters that an engine sees, each of at most KEPT_HEADER_BYTES
_MAX_HEADERS = 64


class Shape(NamedTuple):
    """One pair without its alpha, and where its factors are: places of their first elements in the data."""

    pair: Pair
    a: int
    b: int


@dataclass(frozen=True)
class Layout:
    """What decides where things lie, and nothing else: equal for adapters that differ in numbers and alphas alone.

    ``dtype`` is BF16 or F32, ``data_bytes`` the length of all tensors.
    """

    shapes: tuple[Shape, ...]
    dtype: str
    data_bytes: int

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shapes, self.dtype, self.data_bytes))

    def __hash__(self) -> int:
        return self._hash


class Revision(NamedTuple):
    """``data_start`` counts from the file's start. ``scales[i]`` is that of ``layout.shapes[i]``."""

    layout: Layout
    data_start: int
    scales: npt.NDArray[np.float32]


def copy_header(file: memoryview) -> bytes:
    """The header's bytes as they are in shared memory at this moment: whose they are is for the caller to check."""
    length = int.from_bytes(file[:_PREFIX_BYTES], "little")
    return bytes(file[: _PREFIX_BYTES + min(length, MAX_HEADER_BYTES)])


class Headers:
    """Reads revisions' headers; an equal one is not parsed twice, and equal layouts are one object."""

    def __init__(self) -> None:
        self._known: LruCache[tuple[bytes, int], Revision] = LruCache(_MAX_HEADERS)
        self._layouts: LruCache[Layout, Layout] = LruCache(_MAX_HEADERS)

    def read(self, header: bytes, file_bytes: int) -> Revision:
        """What ``copy_header`` got of a file of so many bytes. Raises InvalidRequest where that is no revision file."""
        if len(header) > KEPT_HEADER_BYTES:
            return _parse(header, file_bytes)
        # with the file's length, as the header is checked against it
        return self._known.get((blake3(header).digest(), file_bytes), lambda: self._parse(header, file_bytes))

    def _parse(self, header: bytes, file_bytes: int) -> Revision:
        revision = _parse(header, file_bytes)
        layout = revision.layout
        return revision._replace(layout=self._layouts.get(layout, lambda: layout))


def _parse(header: bytes, file_bytes: int) -> Revision:
    header_of(memoryview(header), WHAT)
    content, specs = read_header(header, file_bytes - len(header))
    item = ITEM_BYTES[content.dtype]
    shapes = []
    for pair in content.pairs:
        a, b = (specs[tensor_name(pair.place, factor)].data_offsets[0] // item for factor in "AB")
        shapes.append(Shape(Pair(pair.place, pair.rank, 0, pair.inputs, pair.outputs, pair.experts), a, b))
    rslora = content.manifest.rslora
    scales = np.asarray([scale(pair.alpha, pair.rank, rslora=rslora) for pair in content.pairs], np.float32)
    scales.flags.writeable = False
    return Revision(Layout(tuple(shapes), content.dtype, file_bytes - len(header)), len(header), scales)
