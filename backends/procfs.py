"""Who a process is: read from /proc, so that a recycled pid is never taken for the process we started."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessStat(msgspec.Struct, frozen=True):
    """One line of ``/proc/PID/stat``. ``started`` is in clock ticks since boot: with ``pid`` it names one process.

    ``cpu_s`` is the CPU time that all of its threads have used, in seconds.
    """

    pid: int
    state: str
    session: int
    started: int
    cpu_s: float = 0.0

    @property
    def alive(self) -> bool:
        """A zombie has ended: only its parent has not noticed yet."""
        return self.state not in {"Z", "X", "x"}


def read_stat(pid: int) -> ProcessStat | None:
    """The process that has ``pid`` now, or None."""
    try:
        line = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the command name is in parentheses and may itself hold spaces and parentheses
    fields = line.rpartition(")")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return ProcessStat(pid=pid, state=fields[0], session=int(fields[3]), started=int(fields[19]), cpu_s=cpu_s)


def boot_id() -> str:
    """Changes with every boot, so that a record from before it names nobody."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def session_members(session: int) -> list[ProcessStat]:
    """The living processes of a session: an engine and all that it forked, its reaped leader aside."""
    pids = (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())
    stats = (read_stat(pid) for pid in pids)
    return [stat for stat in stats if stat is not None and stat.session == session and stat.alive]
