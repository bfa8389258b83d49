"""``python -m ops.supervise.keeper STATE_DIR``: starts a detached supervisor, and starts it again when it is killed.

It does nothing else, so there is little that could bring it down.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from .backoff import Backoff


def main() -> int:
    """The supervisor's exit status, once it ends by itself."""
    stopping = False
    supervisor: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: object) -> None:
        nonlocal stopping
        stopping = True
        if supervisor is not None:
            supervisor.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    backoff = Backoff(first_s=0.2)
    first_life = True
    while not stopping:
        started = time.monotonic()
        supervisor = subprocess.Popen([sys.executable, "-P", "-m", "ops.supervise", sys.argv[1], str(os.getpid())])
        code = supervisor.wait()
        # a first start that failed is for a person to mend; what ran once is brought back
        if code == 0 or (first_life and code > 0):
            return code
        first_life = False
        time.sleep(backoff.after_exit(time.monotonic() - started))
    return 0


if __name__ == "__main__":
    sys.exit(main())
