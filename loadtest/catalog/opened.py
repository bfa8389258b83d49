"""Run by ``opens``: opens a catalog, resolves one name, and says what that took."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from catalog.names import parse_reference
from catalog.view import CatalogView


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    reference = parse_reference(name)
    before = _private_kib()
    begun = time.perf_counter()
    CatalogView.open(folder).resolve(reference)
    took = time.perf_counter() - begun
    grown = _private_kib() - before
    sys.stdout.buffer.write(msgspec.json.encode({"ms": took * 1000, "private_mb": grown / 1024}))


def _private_kib() -> int:
    """Memory of this process alone: without the catalog's own pages, which all processes of the host share."""
    total, shared = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field, *rest = line.split()
        if not field.endswith(":"):
            shared = line.endswith("data.mdb")
        elif field in ("Private_Clean:", "Private_Dirty:") and not shared:
            total += int(rest[0])
    return total


if __name__ == "__main__":
    main()
