"""``python -m loadtest.catalog.slow_disk --settings FILE.json``: a registrar on a stand-in for an ordinary disk.

Every commit is as durable as the real one, and takes ``COMMIT_S`` longer: what fsync takes on many a disk,
where the one that is measured may be far faster.
"""

from __future__ import annotations

import functools
import sys
import time

from catalog.collector import collecting_rarely
from catalog.layout import Txn
from catalog.serve import serve
from catalog.service import run_service
from catalog.settings import RegistrarSettings

COMMIT_S = 0.008


def main() -> int:
    """The exit status: see ``run_service``."""
    slow = functools.partial(serve, commit=_commit)
    with collecting_rarely():
        return run_service("catalog", "The registrar, on a stand-in for a slow disk.", RegistrarSettings, slow)


def _commit(txn: Txn) -> None:
    time.sleep(COMMIT_S)
    txn.commit()


if __name__ == "__main__":
    sys.exit(main())
