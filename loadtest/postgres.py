"""A real PostgreSQL of one run: its files in a temporary folder, its socket in it, gone when the run is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import asyncpg

# Debian keeps the server's programs out of the path
_DEBIAN = Path("/usr/lib/postgresql")
_START_S = 60.0


def program(name: str) -> Path:
    """A program of PostgreSQL's, in the path or where Debian keeps the newest. Raises FileNotFoundError."""
    versions = sorted(_DEBIAN.glob(f"*/bin/{name}"), key=lambda path: float(path.parts[-3]), reverse=True)
    found = versions[0] if versions else shutil.which(name)
    if not found:
        raise FileNotFoundError(f"PostgreSQL's {name} is not here: install the server (apt-get install postgresql)")
    return Path(found)


def owner() -> pwd.struct_passwd:
    """Who runs the server: this user, unless that is root, as whom it refuses to run."""
    if os.getuid():
        return pwd.getpwuid(os.getuid())
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    return known.get("postgres") or known["nobody"]


class PostgresServer:
    """Started and stopped, or killed, as often as one likes; what was committed stays."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="roost-pg-"))
        self._owner = owner()
        self._databases = 0
        self._postmaster: subprocess.Popen[bytes] | None = None
        self._data = self.folder / "data"
        os.chown(self.folder, self._owner.pw_uid, self._owner.pw_gid)
        self.folder.chmod(0o755)
        made = [program("initdb"), "-D", self._data, "-U", "roost", "-A", "trust", "-E", "UTF8", "--locale=C"]
        # from a folder that the server's user can enter, unlike perhaps that of the tests
        done = subprocess.run([*map(str, made)], cwd="/", capture_output=True, check=False, **self._as_owner())
        if done.returncode:
            raise RuntimeError(done.stderr.decode())
        chosen = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "shared_buffers": "64MB",
            "max_connections": "60",
            **(settings or {}),
        }
        with (self._data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in chosen.items())

    def start(self) -> None:
        """Returns once it takes connections."""
        log = self.folder / "log"
        deadline = time.monotonic() + _START_S
        with log.open("ab") as output:
            # a child of ours, so that there is somebody to reap it when it is killed
            command = [str(program("postgres")), "-D", str(self._data)]
            self._postmaster = subprocess.Popen(command, cwd="/", stdout=output, stderr=output, **self._as_owner())
        while not self._ready():
            if self._postmaster.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start: {log.read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """At once: what was committed is recovered at the next start."""
        self._end(signal.SIGQUIT)

    def kill(self) -> None:
        """The postmaster with SIGKILL."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._postmaster is None:
            raise RuntimeError("PostgreSQL was not started")
        self._postmaster.send_signal(number)
        self._postmaster.wait(timeout=_START_S)
        self._postmaster = None
        deadline = time.monotonic() + _START_S
        # the others notice and end by themselves, and only then may it start again
        while self._in_use():
            if time.monotonic() > deadline:
                raise RuntimeError("PostgreSQL does not end")
            time.sleep(0.01)

    def kill_a_backend(self, application: str = "roost") -> None:
        """One backend with SIGKILL: the postmaster then ends all others and recovers."""
        rows = self.query("SELECT pid FROM pg_stat_activity WHERE application_name = $1 ORDER BY random()", application)
        if rows:
            os.kill(rows[0][0], signal.SIGKILL)

    def database(self) -> str:
        """The address of a new, empty database."""
        self._databases += 1
        name = f"catalog{self._databases}"
        self.query(f"CREATE DATABASE {name}")
        return self.address(name)

    def address(self, database: str) -> str:
        return f"postgresql://roost@/{database}?host={self.folder}"

    def query(self, statement: str, *arguments: object, url: str = "") -> list[Any]:
        async def ask() -> list[Any]:
            connection = await asyncpg.connect(url or self.address("postgres"))
            try:
                return list(await connection.fetch(statement, *arguments))
            finally:
                await connection.close()

        # on a thread of its own: whoever asks may run on a loop
        result: list[Any] = []
        asking = threading.Thread(target=lambda: result.extend(asyncio.run(ask())))
        asking.start()
        asking.join()
        return result

    def close(self) -> None:
        if self._postmaster is not None:
            self.stop()
        shutil.rmtree(self.folder)

    def _ready(self) -> bool:
        asked = [str(program("pg_isready")), "-h", str(self.folder), "-U", "roost", "-d", "postgres", "-q"]
        return subprocess.run(asked, check=False).returncode == 0

    def _in_use(self) -> bool:
        """Whether a process of the server is left: each works in the data folder."""
        return any(_is_in(path, self._data) for path in Path("/proc").glob("[0-9]*/cwd"))

    def _as_owner(self) -> dict[str, Any]:
        if os.getuid():
            return {}
        return {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []}


def _is_in(link: Path, folder: Path) -> bool:
    try:
        return link.readlink() == folder
    except OSError:
        return False


@contextlib.contextmanager
def running_server() -> Iterator[PostgresServer]:
    """A server that takes connections; nothing is left of it."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()
