"""An extent of the host's arena as the path of an engine's load call: the only carrier that the call has.

``roost-arena:///SEGMENT?offset=N&length=N&generation=N&digest=HEX``, with exactly these fields in this order. SEGMENT
is a file's name in the host's shared memory, never a path: whoever may load adapters can't have other files read.
"""

from __future__ import annotations

import re

import msgspec

from backends.extent_record import HEADER_BYTES
from backends.interface import Installable

SCHEME = "roost-arena"
_PREFIX = f"{SCHEME}:///"
_MAX_PATH = 512
_SEGMENT_RE = re.compile(r"roost-[A-Za-z0-9][A-Za-z0-9._-]{0,199}", re.ASCII)
_NUMBER_RE = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)
_DIGEST_RE = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NUMBERS = ("offset", "length", "generation")
_MAX_NUMBER = (1 << 63) - 1


class ExtentPath(msgspec.Struct, frozen=True):
    """``length`` bytes of a revision file at ``offset`` of a segment; ``digest`` is the file's, in hex."""

    segment: str
    offset: int
    length: int
    generation: int
    digest: str

    def __str__(self) -> str:
        numbers = "&".join(f"{name}={getattr(self, name)}" for name in _NUMBERS)
        return f"{_PREFIX}{self.segment}?{numbers}&digest={self.digest}"


def extent_of(adapter: Installable) -> ExtentPath:
    """Where the revision's bytes lie."""
    return ExtentPath(adapter.segment, adapter.offset, adapter.length, adapter.generation, adapter.digest)


def is_extent(path: str) -> bool:
    """Whether a load call means an extent, well written or not."""
    return path.startswith(f"{SCHEME}:")


def parse(path: str) -> ExtentPath:
    """Raises ValueError that names the field and what is wrong with it."""
    if len(path) > _MAX_PATH or not path.startswith(_PREFIX):
        raise ValueError(f"{_shown(path)} is not {_PREFIX}SEGMENT?...")
    segment, _, query = path.removeprefix(_PREFIX).partition("?")
    if _SEGMENT_RE.fullmatch(segment) is None:
        raise ValueError(f"segment {_shown(segment)} is not the name of an arena's segment")
    fields = [part.partition("=") for part in query.split("&")]
    if [name for name, _, _ in fields] != [*_NUMBERS, "digest"]:
        raise ValueError(f"{_shown(query)} does not have the fields {', '.join(_NUMBERS)}, digest, in this order")
    values = {name: value for name, _, value in fields}
    numbers = {name: _number(name, values[name]) for name in _NUMBERS}
    if numbers["offset"] < HEADER_BYTES:
        raise ValueError(f"offset {numbers['offset']} leaves no room for the extent's record")
    if numbers["offset"] % HEADER_BYTES:
        raise ValueError(f"offset {numbers['offset']} is not a multiple of {HEADER_BYTES}")
    if not numbers["length"] or not numbers["generation"]:
        raise ValueError("length and generation must be positive")
    if _DIGEST_RE.fullmatch(values["digest"]) is None:
        raise ValueError(f"digest {_shown(values['digest'])} is not 64 hex digits")
    return ExtentPath(segment, **numbers, digest=values["digest"])


def _number(name: str, text: str) -> int:
    if _NUMBER_RE.fullmatch(text) is None or int(text) > _MAX_NUMBER:
        raise ValueError(f"{name} {_shown(text)} is not a number of bytes or a generation")
    return int(text)


def _shown(text: str) -> str:
    return ascii(text[:80])
