"""The header of a safetensors file, from bytes that nobody vouches for.

The layout: a little-endian u64 with the header's length, that many bytes of JSON (padded with spaces), then the
tensors' data. We demand that the tensors cover the data exactly: no hole, no overlap, nothing after them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NoReturn

import msgspec
import numpy as np

from catalog.names import shown
from packer.stock_header import Columns, parse_entries
from packer.strict_json import parse_object
from wire.outcomes import InvalidRequest

MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 1 << 18
_MAX_DIMENSIONS = 8
_MAX_DIMENSION = 1 << 48
PREFIX_BYTES = 8
# commas bound what a parser may have to build: a tensor needs about six
_MAX_COMMAS = 16 * MAX_TENSORS

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """One tensor: its dtype's name, its shape, and (start, end) of its bytes counted from the data's start."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Tensors(Mapping[str, TensorSpec]):
    """A header's tensors by name, in its order, as columns.

    ``index`` is each one's place, ``spans`` (tensors, 2) their bytes from the data's start, and ``kinds[kind[i]]`` the
    dtype and shape of the i-th.
    """

    def __init__(self, columns: Columns) -> None:
        self.index = dict(zip(columns.names, range(len(columns.names)), strict=True))
        self.kinds, self.kind, self.spans = columns.kinds, columns.kind, columns.spans

    @classmethod
    def of(cls, tensors: Mapping[str, TensorSpec]) -> Tensors:
        """Raises OverflowError for an offset past all files."""
        kinds: dict[tuple[str, tuple[int, ...]], int] = {}
        kind = [kinds.setdefault((spec.dtype, spec.shape), len(kinds)) for spec in tensors.values()]
        spans = np.asarray([spec.data_offsets for spec in tensors.values()], np.int64).reshape(-1, 2)
        return cls(Columns(list(tensors), list(kinds), np.asarray(kind, np.int64), spans))

    def __getitem__(self, name: str) -> TensorSpec:
        place = self.index[name]
        start, end = self.spans[place].tolist()
        dtype, shape = self.kinds[int(self.kind[place])]
        return TensorSpec(dtype, shape, (start, end))

    def __iter__(self) -> Iterator[str]:
        return iter(self.index)

    def as_dict(self) -> dict[str, TensorSpec]:
        """All at once, for a file with few of them."""
        rows = zip(self.index, self.kind.tolist(), *self.spans.T.tolist(), strict=True)
        kinds = self.kinds
        return {name: TensorSpec(kinds[kind][0], kinds[kind][1], (start, end)) for name, kind, start, end in rows}

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, name: object) -> bool:
        return name in self.index


class Header(msgspec.Struct, frozen=True):
    """A checked header. ``data_start`` counts bytes from the file's start."""

    tensors: Tensors
    metadata: dict[str, str]
    data_start: int


_METADATA = msgspec.json.Decoder(dict[str, str])
_TENSORS = msgspec.json.Decoder(dict[str, TensorSpec])

# the metadata where the stock writers put it: strings only, and the tensors after it
_METADATA_RE = re.compile(rb'\{"__metadata__":(\{(?:"(?:[^"\\]|\\.)*"[:,]?)*\}),?')


def parse_header(file: memoryview, what: str) -> Header:
    """The header of ``file``, a whole safetensors file. Raises InvalidRequest that names the tensor and the reason."""
    header = header_of(file, what)
    return check_header(header, file.nbytes - len(header), what)


def check_header(header: bytes | memoryview, data_bytes: int, what: str) -> Header:
    """The header that ``header_of`` found, of a file with so many bytes of data. Raises as ``parse_header`` does."""
    raw = memoryview(header)[PREFIX_BYTES:]
    parsed = _parse_stock(raw)
    tensors, metadata = parsed if parsed is not None else _parse_any(bytes(raw), what)
    _check_tensors(tensors, what)
    _check_cover(tensors, data_bytes, what)
    return Header(tensors, metadata, len(header))


def decode_header(header: bytes, align: int) -> tuple[dict[str, TensorSpec], dict[str, str]] | None:
    """What ``encode_header`` made ``header`` of, tensors and metadata, unchecked; None if it made no such bytes."""
    raw = header[PREFIX_BYTES:]
    prefix = _METADATA_RE.match(raw)
    if prefix is None:
        return None
    try:
        metadata = _METADATA.decode(prefix[1])
        tensors = _TENSORS.decode(b"{" + raw[prefix.end() :])
        # what it says twice, or in other words, is not said so again
        same = encode_header(tensors, metadata, align) == header
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return None
    return (tensors, metadata) if same else None


def encode_header(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str], align: int = 8) -> bytes:
    """Length prefix and header, padded so that the data starts at a multiple of ``align`` bytes."""
    raw = _encode(tensors, metadata)
    padded = raw.ljust(-(-(PREFIX_BYTES + len(raw)) // align) * align - PREFIX_BYTES)
    return len(padded).to_bytes(PREFIX_BYTES, "little") + padded


def _encode(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None) -> bytes:
    body = {**({"__metadata__": metadata} if metadata else {}), **tensors}
    return msgspec.json.encode(body)


def header_of(file: memoryview, what: str) -> memoryview:
    """Length prefix and header of ``file``, as long as they may be. Raises InvalidRequest."""
    if file.nbytes < PREFIX_BYTES:
        raise InvalidRequest(f"{what} is {file.nbytes} bytes long: too short for a safetensors file", field=what)
    length = int.from_bytes(file[:PREFIX_BYTES], "little")
    if length > file.nbytes - PREFIX_BYTES:
        raise InvalidRequest(
            f"{what} declares a header of {length} bytes but holds {file.nbytes - PREFIX_BYTES} after its prefix "
            "(truncated, or not a safetensors file)",
            field=what,
        )
    if length > MAX_HEADER_BYTES:
        raise InvalidRequest(f"{what} declares a header of {length} bytes; at most {MAX_HEADER_BYTES}", field=what)
    header = file[: PREFIX_BYTES + length]
    if bytes(header[PREFIX_BYTES : PREFIX_BYTES + 1]) != b"{":
        raise InvalidRequest(f"{what} has a header that is not a JSON object", field=what)
    text = np.frombuffer(header, np.uint8)[PREFIX_BYTES:]
    if np.count_nonzero(text == ord("{")) > MAX_TENSORS + 2 or np.count_nonzero(text == ord(",")) > _MAX_COMMAS:
        raise InvalidRequest(f"{what} has more than {MAX_TENSORS} tensors", field=what)
    return header


def _parse_stock(raw: memoryview) -> tuple[Tensors, dict[str, str]] | None:
    """Parse fast what the stock writers write; None for anything else."""
    prefix = _METADATA_RE.match(raw)
    columns = parse_entries(raw[prefix.end() :] if prefix else raw[1:])
    if columns is None:
        return None
    tensors = Tensors(columns)
    try:
        metadata = _METADATA.decode(prefix[1]) if prefix else {}
    except (msgspec.MsgspecError, ValueError):
        return None
    once = len(tensors) == len(columns.names) and "__metadata__" not in tensors
    return (tensors, metadata) if once and msgspec.json.encode(metadata) == (prefix[1] if prefix else b"{}") else None


def _parse_any(raw: bytes, what: str) -> tuple[Tensors, dict[str, str]]:
    entries = parse_object(raw, f"{what}: header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidRequest(f"{what}: __metadata__ is not a map of strings", field=what)
    tensors = {}
    for name, entry in entries.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise InvalidRequest(
                f"{what}: tensor {shown(name)} must have dtype, shape and data_offsets, and nothing else", field=what
            )
        try:
            tensors[name] = msgspec.convert(entry, TensorSpec)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{what}: tensor {shown(name)}: {shown(str(error))}", field=what) from None
        if not all(0 <= offset < 1 << 63 for offset in tensors[name].data_offsets):
            raise InvalidRequest(f"{what}: tensor {shown(name)} has impossible offsets", field=what)
    return Tensors.of(tensors), metadata


def _check_tensors(tensors: Tensors, what: str) -> None:
    """Tensors of one dtype and shape are looked at once, in the name of the first of them."""
    names, spans, kind = list(tensors), tensors.spans, tensors.kind
    sizes = np.asarray([_size(*kind) for kind in tensors.kinds], np.int64)
    for place in np.unique(kind, return_index=True)[1][np.flatnonzero(sizes < 0)] if len(names) else ():
        _refuse_kind(names[int(place)], *tensors.kinds[int(kind[place])], what)
    bad = (spans[:, 0] < 0) | (spans[:, 1] < spans[:, 0])
    if bad.any():
        raise InvalidRequest(f"{what}: tensor {shown(names[int(bad.argmax())])} has impossible offsets", field=what)
    bad = spans[:, 1] - spans[:, 0] != sizes[kind] if len(names) else bad
    if bad.any():
        name = names[int(bad.argmax())]
        dtype, shape, (start, end) = msgspec.structs.astuple(tensors[name])
        raise InvalidRequest(
            f"{what}: tensor {shown(name)} has {end - start} bytes, but {dtype} of shape {list(shape)} takes another "
            "number",
            field=what,
        )


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; -1 for one that can't be."""
    possible = len(shape) <= _MAX_DIMENSIONS and all(0 <= size <= _MAX_DIMENSION for size in shape)
    size = math.prod(shape) * ITEM_BYTES[dtype] if possible and dtype in ITEM_BYTES else -1
    return size if size < 1 << 63 else -1


def _refuse_kind(name: str, dtype: str, shape: tuple[int, ...], what: str) -> NoReturn:
    known = dtype in ITEM_BYTES
    reason = (
        "has an impossible shape (negative, too large or too many dimensions)"
        if known
        else f"has the unknown dtype {shown(dtype)}"
    )
    raise InvalidRequest(f"{what}: tensor {shown(name)} {reason}", field=what)


def _check_cover(tensors: Tensors, data_bytes: int, what: str) -> None:
    """No hole, no overlap, nothing after the last tensor."""
    spans = tensors.spans
    order = np.lexsort((spans[:, 1], spans[:, 0]))
    starts, ends = spans[order, 0], spans[order, 1]
    before = np.concatenate(([0], ends[:-1])) if len(ends) else ends
    bad = (starts != before) | (ends > data_bytes)
    if bad.any():
        place = int(bad.argmax())
        name = shown(list(tensors)[int(order[place])])
        start, end, position = int(starts[place]), int(ends[place]), int(before[place])
        if start != position:
            kind = "overlaps the tensor before it" if start < position else "leaves a hole before it"
            raise InvalidRequest(f"{what}: tensor {name} {kind} (offset {start}, not {position})", field=what)
        raise InvalidRequest(
            f"{what}: tensor {name} ends at byte {end} of {data_bytes}: the file is truncated", field=what
        )
    position = int(ends[-1]) if len(ends) else 0
    if position != data_bytes:
        raise InvalidRequest(f"{what} has {data_bytes - position} bytes after its last tensor", field=what)
