"""How fast a follower applies the journal, and how far it lags behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def measure(folder: Path, *, small: bool) -> dict[str, Any]:
    """Samples of a follower of a journal in PostgreSQL; none where that was not measured."""
    return {}


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    """The figures that were measured."""
    return {}
