"""A process to be supervised: ``python -m tests.ops.fake_process READY_FILE [MODE]``.

Writes its pid to READY_FILE when it is ready. MODE ``fail`` ends at once, ``deaf`` never gets ready,
``stubborn`` ignores SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    ready, mode = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    if mode == "fail":
        print("the port is taken")
        return 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else lambda *_: sys.exit(0))
    if mode != "deaf":
        part = ready.with_suffix(".part")
        part.write_text(str(os.getpid()))
        part.replace(ready)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    sys.exit(main())
