"""What a supervised process runs first: ``python -m ops.supervise.entry PARENT_PID MODULE [ARGUMENT ...]``.

Asks the kernel for SIGTERM when the supervisor dies, however it dies, takes all open files that it may have, then
becomes the module. So a killed supervisor leaves no process behind that nobody watches, and a new one starts from a
clean slate.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Have SIGTERM sent to this process when ``parent`` ends. Exits if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(1)


def take_all_files() -> None:
    """Raise the bound on open files as far as it goes: its usual 1024 are for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    parent, module, *arguments = sys.argv[1:]
    end_with_parent(int(parent))
    take_all_files()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
