"""What the supervisor tells of itself: a file that ``roost status``, ``down`` and the next ``up`` read."""

from __future__ import annotations

import enum
import fcntl
import os
import signal
import time
from pathlib import Path

import msgspec

from backends.procfs import boot_id, read_stat
from wire.outcomes import InvalidRequest

from ..layout import write_private


class Phase(enum.StrEnum):
    """Of a process, and of the whole. FAILED: gave up while starting."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Identity(msgspec.Struct, frozen=True):
    """One process of one boot: a recycled pid is somebody else."""

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        stat = read_stat(pid)
        return cls(pid, stat.started, boot_id()) if stat is not None and stat.alive else None

    @property
    def alive(self) -> bool:
        return self == Identity.of(self.pid)


class ProcessState(msgspec.Struct, frozen=True):
    """``since`` is Unix time in seconds of the last change; ``detail`` says how it last ended."""

    name: str
    phase: Phase
    identity: Identity | None = None
    restarts: int = 0
    since: float = 0.0
    detail: str = ""


class EngineState(msgspec.Struct, frozen=True):
    """An engine as the sidecar reports it: see ``wire.node.EngineReport``."""

    name: str
    base: str
    health: str
    detail: str = ""
    pid: int = 0
    since: float = 0.0
    restarts: int = 0


class MeshState(msgspec.Struct, frozen=True):
    """``keeper`` is the process that restarts a detached supervisor."""

    phase: Phase
    supervisor: Identity
    url: str
    keeper: Identity | None = None
    detail: str = ""
    processes: tuple[ProcessState, ...] = ()
    engines: tuple[EngineState, ...] = ()

    @property
    def engines_ready(self) -> bool:
        return all(engine.health == "ready" for engine in self.engines)


def write_state(path: Path, state: MeshState) -> None:
    write_private(path, msgspec.json.encode(state))


def read_state(path: Path) -> MeshState | None:
    """The last state written, by a supervisor that may be long gone; None where there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=MeshState)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


class SupervisorLock:
    """Held for as long as a supervisor of the state folder lives; the kernel frees it however that ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise InvalidRequest(
                f"a supervisor runs on {path.parent.parent} already: see `roost status`, end it with `roost down`",
                field="state_dir",
            ) from None

    def release(self) -> None:
        os.close(self._descriptor)


def end(identity: Identity | None, *, grace_s: float) -> bool:
    """SIGTERM, and SIGKILL after ``grace_s``. Returns whether the process was alive."""
    if identity is None or not identity.alive:
        return False
    os.kill(identity.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while identity.alive:
        if time.monotonic() >= deadline:
            os.kill(identity.pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.05)
    return True
