"""What processes have of a host's and a GPU's memory, and the most of it that they ever had."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

_PROC = Path("/proc")
_EVERY_S = 0.2
_SMI = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


class PeakMemory:
    """While it is entered, looks five times a second at ``roots`` and all that descends from them.

    ``host`` is the largest sum of what they have to themselves (anonymous memory), ``device`` the most that was in use
    on the first GPU by anybody (0 where there is none), in bytes.
    """

    def __init__(self, roots: Collection[int], *, gpu: bool) -> None:
        self._roots = frozenset(roots)
        self._gpu = gpu
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.host = 0
        self.device = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.host = max(self.host, host_bytes(self._roots))
            if self._gpu:
                self.device = max(self.device, device_bytes())
            if self._ended.wait(_EVERY_S):
                return


def host_bytes(roots: Collection[int]) -> int:
    """Anonymous memory of ``roots`` and their descendants."""
    parents = {int(entry.name): _status(entry) for entry in _PROC.iterdir() if entry.name.isdigit()}
    chosen = set(roots)
    while more := {pid for pid, (parent, _) in parents.items() if parent in chosen} - chosen:
        chosen |= more
    return sum(parents[pid][1] for pid in chosen if pid in parents)


def device_bytes() -> int:
    """In use on the first GPU."""
    told = subprocess.run(_SMI, check=True, stdout=subprocess.PIPE, text=True).stdout
    return int(told.split()[0]) << 20


def _status(entry: Path) -> tuple[int, int]:
    """A process's parent, and its anonymous memory in bytes; zeros for one that is gone."""
    parent = anonymous = 0
    try:
        for line in (entry / "status").read_text().splitlines():
            if line.startswith("PPid:"):
                parent = int(line.split()[1])
            elif line.startswith("RssAnon:"):
                anonymous = int(line.split()[1]) << 10
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    return parent, anonymous
