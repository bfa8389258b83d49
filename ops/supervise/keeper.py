"""``python -m ops.supervise.keeper STATE_DIR [PID]``: starts a detached supervisor, and again whenever it is killed.

It does nothing else, so there is little that could bring it down. Where it is killed all the same, the supervisor
starts another and gives it its own PID: that one takes over a supervisor which is not its child.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ..layout import Layout
from .backoff import Backoff
from .state import Identity, Phase, read_state

# a supervisor's exit status before its mesh was ever ready
NEVER_READY = 1
# what stands for the exit status of a supervisor that somebody else started, and that did not end as it should
KILLED = -signal.SIGKILL


class Supervised(Protocol):
    """A supervisor's process."""

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


class Adopted:
    """A supervisor that was started by another keeper: how it ended is told by the state that it left."""

    def __init__(self, pid: int, state_file: Path) -> None:
        self._state_file = state_file
        self._descriptor: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(pid)

    def wait(self) -> int:
        if self._descriptor is not None:
            select.select([self._descriptor], [], [])
        state = read_state(self._state_file)
        return 0 if state is None or state.phase in {Phase.STOPPING, Phase.STOPPED, Phase.FAILED} else KILLED

    def send_signal(self, number: int, /) -> None:
        if self._descriptor is not None:
            signal.pidfd_send_signal(self._descriptor, number)


class Keeper:
    """Runs ``command`` again whenever it ends unasked, except where its first life never got as far as a mesh."""

    def __init__(self, command: Sequence[str], backoff: Backoff) -> None:
        self._command = command
        self._backoff = backoff
        self._supervisor: Supervised | None = None
        self._stopping = False

    def run(self, running: Supervised | None = None) -> int:
        """The supervisor's exit status, once it ends for good. ``running`` is one to take over."""
        first_life = running is None
        while not self._stopping:
            started = time.monotonic()
            self._supervisor = running or subprocess.Popen(self._command)
            running = None
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
    state_dir, *pids = sys.argv[1:]
    command = (sys.executable, "-P", "-m", "ops.supervise", state_dir, str(os.getpid()))
    keeper = Keeper(command, Backoff(first_s=0.2))
    signal.signal(signal.SIGTERM, keeper.pass_on)
    signal.signal(signal.SIGINT, keeper.pass_on)
    return keeper.run(Adopted(int(pids[0]), Layout.of(state_dir).state_file) if pids else None)


def start_keeper(state_dir: Path) -> Identity | None:
    """Start a keeper for the supervisor that calls this, its output going where the supervisor's goes.

    Raises OSError where the host has no room for another process.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ops.supervise.keeper", str(state_dir), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    # somebody has to, should it end before us
    threading.Thread(target=process.wait, name="reap the keeper", daemon=True).start()
    return Identity.of(process.pid)


if __name__ == "__main__":
    sys.exit(main())
