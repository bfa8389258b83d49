"""Parses at once, column by column, a safetensors header that is spelt as the stock writers spell it.

Such a header is one object an entry, ``"NAME":{"dtype":"BF16","shape":[1,2048],"data_offsets":[0,4096]}``, without a
space or an escape: ten quotes, between most of which there are fixed distances. So the quotes' places say where all
else is, and tens of thousands of tensors are read without an object for each.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

_QUOTES = 10
# longest texts that are read here: nine digits of dimensions would be plenty, and offsets must fit an int64
_MAX_SHAPE = 64
_MAX_DTYPE = 8
_MAX_DIGITS = 18
_MAX_PADDING = 1024
_MULTIPLIERS = np.random.default_rng(0).integers(1, 1 << 62, (_MAX_SHAPE + _MAX_DTYPE) // 8, np.uint64) * 2 + 1


class Columns(NamedTuple):
    """Tensors by name, in the header's order; ``kinds[kind[i]]`` is the i-th one's dtype and shape."""

    names: list[str]
    kinds: list[tuple[str, tuple[int, ...]]]
    kind: Integers
    spans: Integers


def parse_entries(entries: bytes | memoryview) -> Columns | None:
    """The tensors of a header whose first entry begins ``entries``; None unless all of it is spelt the stock way."""
    size = len(entries) - _padding(entries)
    text = np.zeros(size + _MAX_SHAPE, np.uint8)
    body = text[:size]
    body[:] = np.frombuffer(entries, np.uint8, size)
    quotes = np.flatnonzero(body == ord('"'))
    if not quotes.size or quotes.size % _QUOTES or body.max() > 126 or body.min() < 32 or (body == ord("\\")).any():
        return None
    at = quotes.reshape(-1, _QUOTES).T
    # the end of each entry's offsets: before "]}," and the next name, or before "]}}" and the end
    ends = np.append(at[0, 1:], body.size) - 3
    fixed = (
        (at[1], b'":{"dtype":"'),
        (at[5], b'","shape":['),
        (at[8] - 2, b'],"data_offsets":['),
        (ends[:-1], b"]},"),
        (ends[-1:], b"]}}"),
    )
    if at[0, 0] or not all(_is_at(text, places, wanted) for places, wanted in fixed):
        return None
    spans = _pairs_of_numbers(text, at[9] + 3, ends)
    kinds = _kinds(text, (at[4] + 1, at[5]), (at[5] + 11, at[8] - 2))
    if spans is None or kinds is None:
        return None
    string = str(entries[:size], "ascii")
    names = [string[start:end] for start, end in zip((at[0] + 1).tolist(), at[1].tolist(), strict=True)]
    return Columns(names, *kinds, spans)


def _padding(entries: bytes | memoryview) -> int:
    """How many spaces ``entries`` end with."""
    end = bytes(entries[-_MAX_PADDING:])
    return len(end) - len(end.rstrip(b" "))


def _windows(text: Bytes, places: Integers, width: int) -> Bytes:
    """(places, width): the bytes from each place on."""
    return np.lib.stride_tricks.sliding_window_view(text, width)[places]


def _is_at(text: Bytes, places: Integers, wanted: bytes) -> bool:
    in_range = places.size == 0 or (int(places.min()) >= 0 and int(places.max()) + len(wanted) <= text.size)
    return in_range and bool((_windows(text, places, len(wanted)) == np.frombuffer(wanted, np.uint8)).all())


def _pairs_of_numbers(text: Bytes, starts: Integers, ends: Integers) -> Integers | None:
    """The two integers of each ``START,END``; None if one is not spelt so, or has too many digits."""
    lengths = ends - starts
    width = int(lengths.max())
    if int(lengths.min()) < 3 or width > 2 * _MAX_DIGITS + 1:
        return None
    window = _windows(text, starts, width)
    comma = (window == ord(",")).argmax(axis=1)
    column = np.arange(width)[:, None]
    digits = np.ascontiguousarray(window.T) - np.uint8(ord("0"))
    first, second = column < comma, (column > comma) & (column < lengths)
    counts = first.sum(axis=0), second.sum(axis=0)
    row = np.arange(len(starts))
    spelt = (window[row, comma] == ord(",")).all() and not (digits[first | second] > 9).any()
    for count, place in zip(counts, (np.zeros_like(comma), comma + 1), strict=True):
        zero_led = (digits[np.minimum(place, width - 1), row] == 0) & (count > 1)
        spelt = spelt and count.min() >= 1 and count.max() <= _MAX_DIGITS and not zero_led.any()
    if not spelt:
        return None
    numbers = np.zeros((len(starts), 2), np.int64)
    for which, mask in enumerate((first, second)):
        for digit, counts_here in zip(digits, mask, strict=True):
            numbers[:, which] = np.where(counts_here, numbers[:, which] * 10 + digit, numbers[:, which])
    return numbers


def _kinds(
    text: Bytes, dtype: tuple[Integers, Integers], shape: tuple[Integers, Integers]
) -> tuple[list[tuple[str, tuple[int, ...]]], Integers] | None:
    """The distinct (dtype, shape), and which of them each tensor has."""
    columns = []
    for (starts, ends), width in ((dtype, _MAX_DTYPE), (shape, _MAX_SHAPE)):
        lengths = ends - starts
        if int(lengths.min()) < 0 or int(lengths.max()) > width:
            return None
        width = -(-int(lengths.max()) // 8) * 8 if width == _MAX_SHAPE else width
        columns.append(np.where(np.arange(width) < lengths[:, None], _windows(text, starts, width), 0))
    keys = np.ascontiguousarray(np.concatenate(columns, axis=1).astype(np.uint8)).view(np.uint64)
    # wraps around, as a hash may; that equal hashes are equal texts is checked
    hashes = (keys * _MULTIPLIERS[: keys.shape[1]]).sum(axis=1)
    _, places, kind = np.unique(hashes, return_index=True, return_inverse=True)
    if not (keys == keys[places[kind]]).all():
        return None
    kinds = []
    for key in keys[places]:
        raw = key.tobytes()
        try:
            dimensions = msgspec.json.decode(b"[" + raw[_MAX_DTYPE:].rstrip(b"\0") + b"]", type=tuple[int, ...])
        except (msgspec.MsgspecError, ValueError):
            return None
        kinds.append((raw[:_MAX_DTYPE].rstrip(b"\0").decode(), dimensions))
    return kinds, kind.astype(np.int64)
