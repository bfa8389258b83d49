"""The files that vLLM reads from the folder that the environment variable VLLM_TUNED_CONFIG_FOLDER names.

Each is nested: the engine's slots and one, slices, tokens, k, n, and there a configuration. vLLM takes the nearest
number on each level but that of the slices, which must be there, or its engine ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .configurations import Configuration

# the most that vLLM packs into one call is q, k and v
SLICES = (1, 2, 3)
_FILES = {"shrink": "SHRINK", "expand": "EXPAND_TRUE"}


class Entry(NamedTuple):
    """What vLLM is to take for an ``op`` with so many slices, tokens, and a ``width`` on the base's side."""

    op: str
    slices: int
    tokens: int
    width: int
    configuration: Configuration


def write_files(
    folder: Path,
    gpu: str,
    slots: int,
    rank: int,
    entries: Iterable[Entry],
    default: Callable[[str, int, int, int], Configuration],
) -> list[Path]:
    """Write both files for engines with so many slots; ``gpu`` is what torch calls it. A number of slices that no
    entry has gets what ``default`` says of (op, slices, tokens, width)."""
    entries = list(entries)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for op, end in _FILES.items():
        of_op = [entry for entry in entries if entry.op == op]
        for slices in sorted(set(SLICES) - {entry.slices for entry in of_op}):
            width = max(entry.width for entry in of_op)
            tokens = sorted({entry.tokens for entry in of_op})
            of_op += [Entry(op, slices, one, width, default(op, slices, one, width)) for one in tokens]
        path = folder / f"{gpu.replace(' ', '_').replace('-', '_')}_{end}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(_nested(of_op, slots, rank)), indent=1) + b"\n")
        written.append(path)
    return written


def _nested(entries: Iterable[Entry], slots: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in entries:
        k, n = (entry.width, rank) if entry.op == "shrink" else (rank, entry.width)
        level = found
        for key in (slots + 1, entry.slices, entry.tokens, k):
            level = level.setdefault(str(key), {})
        level[str(n)] = entry.configuration
    return found
