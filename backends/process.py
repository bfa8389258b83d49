"""Engine processes that outlive the sidecar which started them.

An engine runs in a session of its own. A record file names it (pid, start time, boot, digest of its command), so that
a later sidecar adopts exactly that process, and nobody ever signals a stranger that inherited the pid.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from blake3 import blake3

from wire.outcomes import EngineFailed

from .procfs import boot_id, read_stat, session_members

POLL_S = 0.05
LOG_TAIL_BYTES = 4096


class Command(msgspec.Struct, frozen=True):
    """What to run: the arguments without the port, which is ours to choose, and what the environment adds or unsets.

    ``token_in`` names the variable in which the process finds the bearer token that it must ask for, if it can.
    """

    argv: tuple[str, ...]
    env: dict[str, str | None]
    token_in: str = ""

    def digest(self) -> str:
        """Engines whose digests are equal were started alike."""
        return blake3(msgspec.json.encode(self, order="sorted")).hexdigest()


class EngineRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine process that somebody started. ``started`` is in clock ticks since the boot named by ``boot``.

    ``token`` lets requests in; the record's file is its owner's alone.
    """

    name: str
    pid: int
    started: int
    boot: str
    host: str
    port: int
    command: str
    log: str
    token: str = ""


def is_alive(record: EngineRecord) -> bool:
    """Whether the very process of the record still runs."""
    stat = read_stat(record.pid)
    return stat is not None and stat.alive and stat.started == record.started and record.boot == boot_id()


class EngineProcess:
    """The process of one engine of a node: started, adopted and ended through its record under ``run_dir``."""

    def __init__(self, name: str, *, run_dir: Path, log_dir: Path) -> None:
        self.name = name
        self.log = log_dir / f"engine-{name}.log"
        self._run_dir = run_dir
        self._path = _record_path(run_dir, name)
        self._child: subprocess.Popen[bytes] | None = None
        self.record = _read_record(self._path)

    @property
    def alive(self) -> bool:
        if self._child is not None:
            self._child.poll()  # reap, where we are the parent
        return self.record is not None and is_alive(self.record)

    def cpu_s(self) -> float:
        """The CPU time in seconds that the engine and what it started have used; 0 where there is none."""
        return sum(member.cpu_s for member in session_members(self.record.pid)) if self.record is not None else 0.0

    def adopt(self, command: Command) -> bool:
        """Whether an engine that was started by the same command is running already: it is ours from now on."""
        return self.alive and self.record is not None and self.record.command == command.digest()

    def spawn(self, command: Command, *, host: str, port: int) -> EngineRecord:
        """Start the engine on ``host:port`` (0: a free port) and write its record. Ends a predecessor first.

        Raises EngineFailed where it can't even be started.
        """
        self.stop(grace_s=0.0)
        chosen = port or free_port(host)
        token = secrets.token_urlsafe(32) if command.token_in else ""
        environment = _environment({**command.env, **({command.token_in: token} if token else {})})
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".log.1"))
        argv = [*command.argv, "--host", host, "--port", str(chosen)]
        try:
            with self.log.open("ab") as log:
                self._child = subprocess.Popen(
                    argv, env=environment, cwd=self._run_dir, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise EngineFailed(f"engine {self.name} can't be started: {error}") from error
        stat = read_stat(self._child.pid)
        if stat is None:
            raise EngineFailed(f"engine {self.name} ended at once: see {self.log}")
        self.record = EngineRecord(
            name=self.name, pid=stat.pid, started=stat.started, boot=boot_id(), host=host, port=chosen,
            command=command.digest(), log=str(self.log), token=token,
        )  # fmt: skip
        _write_record(self._path, self.record)
        return self.record

    def stop(self, *, grace_s: float) -> None:
        """End the engine and everything it started, and forget it. Blocks for ``grace_s`` at most, and a moment."""
        if self.record is not None:
            _end(self.record, grace_s)
            self._path.unlink(missing_ok=True)
            self.record = None
        if self._child is not None:
            self._child.wait()
            self._child = None

    def log_tail(self) -> str:
        """The end of the engine's log, for an error message."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                return log.read().decode(errors="replace").strip()
        except FileNotFoundError:
            return ""


def stop_recorded(run_dir: Path, *, grace_s: float = 15.0) -> list[str]:
    """End every engine that a record under ``run_dir`` names, whoever started it. Returns their names."""
    ended: list[str] = []
    for path in sorted((run_dir / "engines").glob("*.json")):
        record = _read_record(path)
        if record is not None:
            _end(record, grace_s)
            ended.append(record.name)
        path.unlink(missing_ok=True)
    return ended


def running(run_dir: Path) -> list[EngineRecord]:
    """The engines of which a record is under ``run_dir`` and which run now, whoever started them, by name."""
    records = map(_read_record, sorted((run_dir / "engines").glob("*.json")))
    return [record for record in records if record is not None and is_alive(record)]


def free_port(host: str) -> int:
    """A port that nobody has now. Should somebody take it before the engine does, the engine ends and says so."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def python() -> str:
    """The interpreter that engines run under: this one, whose environment has the engine installed."""
    return sys.executable


def _end(record: EngineRecord, grace_s: float) -> None:
    if record.boot != boot_id():
        return
    leader = read_stat(record.pid)
    if leader is not None and leader.started != record.started:
        # the pid was given to somebody else, which it can't be while any process of our session lives
        return
    if grace_s > 0 and leader is not None and leader.alive:
        _signal(record.pid, signal.SIGTERM)
        _wait_for_end(record.pid, grace_s)
    for member in session_members(record.pid):
        _signal(member.pid, signal.SIGKILL)
    _wait_for_end(record.pid, 10.0)


def _wait_for_end(session: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while session_members(session) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _record_path(run_dir: Path, name: str) -> Path:
    return run_dir / "engines" / f"{name}.json"


def _read_record(path: Path) -> EngineRecord | None:
    """None where there is no record, or one that we did not write: such an engine is not ours to touch."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineRecord)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _write_record(path: Path, record: EngineRecord) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(record))
    partial.replace(path)
