"""The header of a safetensors file, from bytes that nobody vouches for.

The layout: a little-endian u64 with the header's length, that many bytes of JSON (padded with spaces), then the
tensors' data. We demand that the tensors cover the data exactly: no hole, no overlap, nothing after them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from catalog.names import shown
from packer.strict_json import parse_object
from wire.outcomes import InvalidRequest

MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 1 << 18
_MAX_DIMENSIONS = 8
_MAX_DIMENSION = 1 << 48
_PREFIX_BYTES = 8
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


class Header(msgspec.Struct, frozen=True):
    """A checked header. ``data_start`` counts bytes from the file's start."""

    tensors: dict[str, TensorSpec]
    metadata: dict[str, str]
    data_start: int


class _Metadata(msgspec.Struct):
    metadata: dict[str, str] | None = msgspec.field(name="__metadata__", default=None)


def parse_header(file: memoryview, what: str) -> Header:
    """The header of ``file``, a whole safetensors file. Raises InvalidRequest that names the tensor and the reason."""
    raw = _header_bytes(file, what)
    data_start = _PREFIX_BYTES + len(raw)
    parsed = _parse_stock(raw)
    tensors, metadata = parsed if parsed is not None else _parse_any(raw, what)
    for name, spec in tensors.items():
        _check_tensor(name, spec, what)
    _check_cover(tensors, file.nbytes - data_start, what)
    return Header(tensors, metadata, data_start)


def encode_header(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str], align: int = 8) -> bytes:
    """Length prefix and header, padded so that the data starts at a multiple of ``align`` bytes."""
    raw = _encode(tensors, metadata)
    padded = raw.ljust(-(-(_PREFIX_BYTES + len(raw)) // align) * align - _PREFIX_BYTES)
    return len(padded).to_bytes(_PREFIX_BYTES, "little") + padded


def _encode(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None) -> bytes:
    body = {**({"__metadata__": metadata} if metadata else {}), **tensors}
    return msgspec.json.encode(body)


def _header_bytes(file: memoryview, what: str) -> bytes:
    if file.nbytes < _PREFIX_BYTES:
        raise InvalidRequest(f"{what} is {file.nbytes} bytes long: too short for a safetensors file", field=what)
    length = int.from_bytes(file[:_PREFIX_BYTES], "little")
    if length > file.nbytes - _PREFIX_BYTES:
        raise InvalidRequest(
            f"{what} declares a header of {length} bytes but holds {file.nbytes - _PREFIX_BYTES} after its prefix "
            "(truncated, or not a safetensors file)",
            field=what,
        )
    if length > MAX_HEADER_BYTES:
        raise InvalidRequest(f"{what} declares a header of {length} bytes; at most {MAX_HEADER_BYTES}", field=what)
    raw = bytes(file[_PREFIX_BYTES : _PREFIX_BYTES + length])
    if not raw.startswith(b"{"):
        raise InvalidRequest(f"{what} has a header that is not a JSON object", field=what)
    if raw.count(b"{") > MAX_TENSORS + 2 or raw.count(b",") > _MAX_COMMAS:
        raise InvalidRequest(f"{what} has more than {MAX_TENSORS} tensors", field=what)
    return raw


def _parse_stock(raw: bytes) -> tuple[dict[str, TensorSpec], dict[str, str]] | None:
    """Parse fast what the stock writers write; None for anything else.

    A header that comes out of our encoder byte for byte has no duplicate keys and no unknown ones: what msgspec
    would have let pass shows as a difference.
    """
    try:
        metadata = msgspec.json.decode(raw, type=_Metadata).metadata
        if metadata is None:
            tensors = msgspec.json.decode(raw, type=dict[str, TensorSpec])
        else:
            prefix = msgspec.json.encode({"__metadata__": metadata})[:-1]
            rest = raw[len(prefix) :].lstrip(b",")
            tensors = msgspec.json.decode(b"{" + rest, type=dict[str, TensorSpec])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if _encode(tensors, metadata) != raw.rstrip(b" "):
        return None
    return tensors, metadata or {}


def _parse_any(raw: bytes, what: str) -> tuple[dict[str, TensorSpec], dict[str, str]]:
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
    return tensors, metadata


def _check_tensor(name: str, spec: TensorSpec, what: str) -> None:
    def refuse(reason: str) -> InvalidRequest:
        return InvalidRequest(f"{what}: tensor {shown(name)} {reason}", field=what)

    item = ITEM_BYTES.get(spec.dtype)
    if item is None:
        raise refuse(f"has the unknown dtype {shown(spec.dtype)}")
    if len(spec.shape) > _MAX_DIMENSIONS or any(not 0 <= size <= _MAX_DIMENSION for size in spec.shape):
        raise refuse("has an impossible shape (negative, too large or too many dimensions)")
    start, end = spec.data_offsets
    if not 0 <= start <= end < 1 << 63:
        raise refuse("has impossible offsets")
    if math.prod(spec.shape) * item != end - start:
        raise refuse(f"has {end - start} bytes, but {spec.dtype} of shape {list(spec.shape)} takes another number")


def _check_cover(tensors: Mapping[str, TensorSpec], data_bytes: int, what: str) -> None:
    position = 0
    for name, spec in sorted(tensors.items(), key=lambda entry: entry[1].data_offsets):
        start, end = spec.data_offsets
        if start != position:
            kind = "overlaps the tensor before it" if start < position else "leaves a hole before it"
            raise InvalidRequest(f"{what}: tensor {shown(name)} {kind} (offset {start}, not {position})", field=what)
        if end > data_bytes:
            raise InvalidRequest(
                f"{what}: tensor {shown(name)} ends at byte {end} of {data_bytes}: the file is truncated", field=what
            )
        position = end
    if position != data_bytes:
        raise InvalidRequest(f"{what} has {data_bytes - position} bytes after its last tensor", field=what)
