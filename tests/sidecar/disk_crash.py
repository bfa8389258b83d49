"""Run by test_disk.py: kills a disk tier by SIGKILL before each of its system calls in turn, and says what was left.

``python -m tests.sidecar.disk_crash FOLDER`` prints one JSON object. Every life takes over what the one before it left.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from catalog.blobs import BlobStore
from sidecar.arena import Arena
from sidecar.disk import DiskTier
from sidecar.extents import HEADER_BYTES, Extent
from sidecar.policies.lru import Lru

SIZE = 10_000
BUDGET = 2 * SIZE + SIZE // 2
REVISIONS = 4
BLOCK = 12_288
CALLS = ("open", "write", "fchmod", "fsync", "rename", "unlink", "utime", "close")


def revision(number: int) -> bytes:
    return bytes([number]) * SIZE


class Fuse:
    """Ends this process at the call of number ``at``; a write has then taken half of its bytes."""

    def __init__(self, at: int) -> None:
        self.left = at

    def burn(self) -> bool:
        self.left -= 1
        return self.left == 0

    def wrap(self, name: str) -> None:
        real: Callable[..., Any] = getattr(os, name)

        def call(*args: Any, **keywords: Any) -> Any:
            if self.burn():
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **keywords)

        setattr(os, name, call)


def live(folder: Path, arena: Arena, at: int) -> None:
    """One life of a tier: it keeps every revision, reads some, and drops one."""
    fuse = Fuse(at)
    for name in CALLS:
        fuse.wrap(name)
    tier = DiskTier(folder / "tier", BUDGET, arena, Lru())
    for number in range(REVISIONS):
        data = revision(number)
        extent = Extent(HEADER_BYTES + number * BLOCK, SIZE, number + 1)
        tier.arrived(blake3(data).hexdigest(), extent)
        tier.wait()
        with tier.open(blake3(revision(number // 2)).hexdigest()):
            pass
    tier.distrust(blake3(revision(REVISIONS - 1)).hexdigest())
    tier.close()


def look(folder: Path, arena: Arena) -> list[str]:
    """What is wrong with what is on disk, once a tier has taken it over."""
    wrong = []
    tier = DiskTier(folder / "tier", BUDGET, arena, Lru())
    store = BlobStore(folder / "tier")
    found = store.stored()
    for blob in found:
        store.verify(blob.digest)
        if blob.digest not in tier:
            wrong.append("a file that the tier does not know")
    if tier.used != sum(blob.size for blob in found) or tier.used > BUDGET:
        wrong.append(f"{tier.used} bytes are counted of {len(found)} files")
    if list((folder / "tier" / "partial").iterdir()):
        wrong.append("a partial file")
    tier.close()
    return wrong


def main() -> None:
    folder = Path(sys.argv[1])
    arena = Arena("segment", REVISIONS * BLOCK, root=folder)
    for number in range(REVISIONS):
        extent = Extent(HEADER_BYTES + number * BLOCK, SIZE, number + 1)
        with arena.begin(extent) as view:
            view[:] = revision(number)
        arena.seal(extent, blake3(revision(number)).hexdigest())
    kills, wrong, at = 0, [], 0
    while True:
        at += 1
        child = os.fork()
        if child == 0:
            try:
                live(folder, arena, at)
            except BaseException:
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        wrong += [f"after call {at}: {line}" for line in look(folder, arena)]
        if not os.WIFSIGNALED(status):
            break
        kills += 1
    arena.close()
    print(json.dumps({"kills": kills, "wrong": wrong, "last": os.WEXITSTATUS(status)}))


if __name__ == "__main__":
    main()
