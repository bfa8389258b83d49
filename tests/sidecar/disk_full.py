"""Run by test_disk.py in a mount namespace of its own: a disk tier on a file system that is really full, and then not.

``python -m tests.sidecar.disk_full FOLDER``, with a small file system mounted at FOLDER/small, prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path

from catalog.blobs import BlobStore
from sidecar.arena import Arena
from sidecar.disk import DiskTier
from sidecar.extents import HEADER_BYTES, Extent
from sidecar.fetch import Fetcher
from sidecar.policies.lru import Lru

SIZE = 100_000
BLOCK = 106_496
FILLER_BYTES = 950_000


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


async def main() -> None:
    folder = Path(sys.argv[1])
    told = Told()
    logging.getLogger("sidecar").addHandler(told)
    clock = [0.0]
    arena = Arena("segment", 16 * BLOCK, root=folder)
    store = BlobStore(folder / "store")
    tier = DiskTier(folder / "small" / "tier", 10 * SIZE, arena, Lru(), now=lambda: clock[0])
    fetcher = Fetcher(store, arena, workers=1, timeout_s=30.0, nearer=[tier])
    generation = 0

    async def fetch(count: int) -> int:
        nonlocal generation
        for _ in range(count):
            with store.writer() as writer:
                writer.write(os.urandom(SIZE))
                digest = writer.commit().digest
            extent = Extent(HEADER_BYTES + generation % 16 * BLOCK, SIZE, generation + 1)
            generation += 1
            await fetcher.fetch(digest, extent, lambda message: None)
            arena.read(extent).release()
            await asyncio.to_thread(tier.wait)
        return tier.used // SIZE

    filler = folder / "small" / "filler"
    filler.write_bytes(bytes(FILLER_BYTES))
    found = {"when_full": await fetch(4), "warnings_when_full": len(told.lines)}
    filler.unlink()
    found["while_it_pauses"] = await fetch(2)
    clock[0] += 3600.0
    found["with_room"] = await fetch(4)
    filler.write_bytes(bytes(400_000))
    found["beside_others"] = await fetch(8)
    found["warnings"] = len(told.lines)
    found["partial"] = len(list((folder / "small" / "tier" / "partial").iterdir()))
    fetcher.close()
    arena.close()
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
