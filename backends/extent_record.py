"""The record before an extent's data, by which whoever maps an arena's segment knows what he reads.

It is written when the data is whole and zeroed before the room is given away. The sidecar writes it, engines check it
before and after a copy. Numbers are native: both are processes of one host.
"""

from __future__ import annotations

import struct
from pathlib import Path

# where segments are files; their names begin with "roost-"
SEGMENTS = Path("/dev/shm")  # noqa: S108
# the record takes these bytes, right before the extent's data
HEADER_BYTES = 64

_MAGIC = b"roostext"
_RECORD = struct.Struct("<8sQQ32s")


def write(buffer: bytearray | memoryview, offset: int, *, generation: int, length: int, digest: str) -> None:
    """Write the record of the data at ``offset``; ``digest`` is blake3 in hex."""
    _RECORD.pack_into(buffer, offset - HEADER_BYTES, _MAGIC, generation, length, bytes.fromhex(digest))


def matches(buffer: bytes | memoryview, offset: int, *, generation: int, length: int, digest: str | None) -> bool:
    """Whether the data at ``offset`` is this extent's. A ``digest`` of None is not looked at."""
    magic, *found, raw = _RECORD.unpack_from(buffer, offset - HEADER_BYTES)
    return magic == _MAGIC and found == [generation, length] and (digest is None or raw.hex() == digest)
