"""One registrar a catalog: a lock that the kernel frees however its holder ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from wire.outcomes import JournalUnavailable

_LOCK_FILE = "registrar.lock"


class ExclusiveFolder:
    """Held for as long as this process may write the catalog in ``folder``; a context manager.

    Raises JournalUnavailable where another process holds it, and says which; and where the folder can't be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalUnavailable(f"the catalog in {folder} can't be written: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise JournalUnavailable(
                f"another registrar (process {holder or 'unknown'}) writes the catalog in {folder}"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)

    def __enter__(self) -> ExclusiveFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._fd)
