"""Opening a catalog in a fresh process: the time to its first answer, and the private memory that it takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from .filled import policy_name


def measure(catalogs: Mapping[int, Path], *, rounds: int) -> dict[str, Any]:
    """By size: milliseconds and megabytes of each process."""
    found: dict[str, Any] = {str(size): {"ms": [], "private_mb": []} for size in catalogs}
    for _ in range(rounds):
        for size, folder in catalogs.items():
            command = [sys.executable, "-m", "loadtest.catalog.opened", str(folder), policy_name(size // 2)]
            opened = msgspec.json.decode(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            for name, figure in opened.items():
                found[str(size)][name].append(figure)
    return found
