"""Keeps the logs of a host bounded while they are being written.

Processes and engines have their log open as standard output, for appending, and know nothing of rotation: so what a log
holds is copied away and the file is emptied under them. A line that is written between the two may be lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

_log = logging.getLogger(__name__)

KEPT_BYTES = 64 << 20
LOOK_EVERY_S = 5.0


async def keep_bounded(folder: Path, *, kept_bytes: int = KEPT_BYTES, every_s: float = LOOK_EVERY_S) -> None:
    """Look at every log of ``folder`` now and then, until cancelled."""
    while True:
        await asyncio.to_thread(rotate, folder, kept_bytes)
        await asyncio.sleep(every_s)


def rotate(folder: Path, kept_bytes: int) -> list[str]:
    """Empty each ``NAME.log`` that is larger than ``kept_bytes``, its content kept in ``NAME.log.1``.

    Where there is no room for the copy, there is none for the log either: it is emptied all the same. Returns the
    names.
    """
    emptied: list[str] = []
    for log in sorted(folder.glob("*.log")):
        try:
            if log.stat().st_size <= kept_bytes:
                continue
            _copy(log, log.with_suffix(".log.1"))
            os.truncate(log, 0)
        except OSError as error:
            _log.warning("%s can't be emptied: %s", log, error)
        else:
            emptied.append(log.name)
    return emptied


def _copy(log: Path, kept: Path) -> None:
    try:
        with kept.open("wb") as target, log.open("rb") as source:
            kept.chmod(0o600)
            shutil.copyfileobj(source, target, 1 << 20)
    except OSError as error:
        _log.warning("%s is emptied without a copy: %s", log, error)
        kept.unlink(missing_ok=True)
