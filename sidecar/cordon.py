"""The mark of a node that is out of service: a file beside its engine records, for the sidecar's next life."""

from __future__ import annotations

from pathlib import Path


def _mark(run_dir: str, node: str) -> Path:
    return Path(run_dir) / f"{node}.cordoned"


def is_cordoned(run_dir: str, node: str) -> bool:
    return _mark(run_dir, node).exists()


def keep_cordoned(run_dir: str, node: str, *, on: bool) -> None:
    """Set or remove the mark. Raises OSError where the folder takes no files."""
    mark = _mark(run_dir, node)
    if on:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    else:
        mark.unlink(missing_ok=True)
