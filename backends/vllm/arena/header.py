"""The layout of a revision, read from its header once: adapters of one rank and the same targets share theirs."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from packer.modules import tensor_name
from packer.revision import Pair, RevisionFile
from packer.safetensors_header import MAX_HEADER_BYTES

_PREFIX_BYTES = 8
# headers of the adapters that an engine sees; a large one of experts takes a quarter of a MiB
_MAX_HEADERS = 256

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


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


class Recent(Generic[K, V]):
    """A cache of the ``size`` keys that were asked for last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of ``key``, made where there is none; what ``make`` raises is not kept."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = self._values[key] = make()
        if len(self._values) > self._size:
            self._values.popitem(last=False)
        return value


class Headers:
    """Reads revisions' headers; an equal one is not parsed twice, and equal layouts are one object."""

    def __init__(self) -> None:
        self._known: Recent[tuple[bytes, int], Revision] = Recent(_MAX_HEADERS)
        self._layouts: Recent[Layout, Layout] = Recent(_MAX_HEADERS)

    def read(self, file: memoryview) -> Revision:
        """Raises InvalidRequest for bytes that are no revision file."""
        length = int.from_bytes(file[:_PREFIX_BYTES], "little")
        header = bytes(file[: _PREFIX_BYTES + min(length, MAX_HEADER_BYTES)])
        # with the file's length, as the header is checked against it
        return self._known.get((header, file.nbytes), lambda: self._parse(file))

    def _parse(self, buffer: memoryview) -> Revision:
        revision = _parse(buffer)
        layout = revision.layout
        return revision._replace(layout=self._layouts.get(layout, lambda: layout))


def _parse(buffer: memoryview) -> Revision:
    file = RevisionFile(buffer)
    item = 2 if file.dtype == "BF16" else 4
    shapes = []
    for pair in file.pairs:
        a, b = (file.specs[tensor_name(pair.place, factor)].data_offsets[0] // item for factor in "AB")
        shapes.append(Shape(Pair(pair.place, pair.rank, 0, pair.inputs, pair.outputs, pair.experts), a, b))
    scales = np.asarray([file.scale(pair) for pair in file.pairs], np.float32)
    scales.flags.writeable = False
    return Revision(Layout(tuple(shapes), file.dtype, file.data.nbytes), file.data_start, scales)
