"""A base's fingerprint, read again only when its files changed: weights can be hundreds of gigabytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from packer.fingerprint import Fingerprint, fingerprint

from .layout import write_private


class _Known(msgspec.Struct, frozen=True):
    files: dict[str, tuple[int, int, int]]
    value: Fingerprint


def fingerprint_of(model_dir: Path, cache: Path, progress: Callable[[int, int], None] | None = None) -> Fingerprint:
    """As ``packer.fingerprint``, remembered under ``cache`` for as long as no file's size, time or inode changes."""
    files = _listing(model_dir)
    known = _read(cache)
    entry = known.get(str(model_dir))
    if entry is not None and entry.files == files:
        return entry.value
    value = fingerprint(model_dir, progress)
    known[str(model_dir)] = _Known(files, value)
    write_private(cache, msgspec.json.encode(known))
    return value


def _listing(model_dir: Path) -> dict[str, tuple[int, int, int]]:
    if not model_dir.is_dir():
        return {}
    stats = {path.name: path.stat() for path in model_dir.iterdir() if path.is_file()}
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in sorted(stats.items())}


def _read(cache: Path) -> dict[str, _Known]:
    try:
        return msgspec.json.decode(cache.read_bytes(), type=dict[str, _Known])
    except (FileNotFoundError, msgspec.MsgspecError):
        return {}
