"""``python -m ops.supervise.keeper STATE_DIR``: starts a detached supervisor, and starts it again when it is killed.

It does nothing else, so there is little that could bring it down.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from .backoff import Backoff

# a supervisor's exit status before its mesh was ever ready
NEVER_READY = 1


class Keeper:
    """Runs ``command`` again whenever it ends unasked, except where its first life never got as far as a mesh."""

    def __init__(self, command: Sequence[str], backoff: Backoff) -> None:
        self._command = command
        self._backoff = backoff
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """The supervisor's exit status, once it ends for good."""
        first_life = True
        while not self._stopping:
            started = time.monotonic()
            self._supervisor = subprocess.Popen(self._command)
            code = self._supervisor.wait()
            # a first start that failed is for a person to mend; what ran once is brought back
            if code == 0 or (first_life and code == NEVER_READY):
                return code
            first_life = False
            time.sleep(self._backoff.after_exit(time.monotonic() - started))
        return 0

    def pass_on(self, number: int, _frame: object) -> None:
        """A signal for us is one for the supervisor, and its last life."""
        self._stopping = True
        if self._supervisor is not None:
            self._supervisor.send_signal(number)


def main() -> int:
    """The supervisor's exit status, once it ends by itself."""
    command = (sys.executable, "-P", "-m", "ops.supervise", sys.argv[1], str(os.getpid()))
    keeper = Keeper(command, Backoff(first_s=0.2))
    signal.signal(signal.SIGTERM, keeper.pass_on)
    signal.signal(signal.SIGINT, keeper.pass_on)
    return keeper.run()


if __name__ == "__main__":
    sys.exit(main())
