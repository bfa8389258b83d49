"""Where a deployment keeps its things, all under one state folder that only its owner may enter."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

# a socket's path must fit sockaddr_un: 108 bytes with the final zero
MAX_SOCKET_PATH = 107
LONGEST_SOCKET_NAME = "registrar-feed.sock.lock"


def absolute(path: str) -> Path:
    """``path`` from the root, with ``~`` expanded; links are kept as they are."""
    return Path(path).expanduser().absolute()


@dataclass(frozen=True)
class Layout:
    """``root`` is absolute."""

    root: Path

    @classmethod
    def of(cls, state_dir: str) -> Layout:
        return cls(absolute(state_dir))

    @property
    def catalog(self) -> Path:
        return self.root / "catalog"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def admin_key(self) -> Path:
        return self.keys / "admin.key"

    @property
    def state_file(self) -> Path:
        return self.run / "supervisor.json"

    @property
    def lock_file(self) -> Path:
        return self.run / "supervisor.lock"

    @property
    def config_file(self) -> Path:
        """The configuration in force, as the supervisor was started with it."""
        return self.run / "config.json"

    def settings_file(self, process: str) -> Path:
        return self.run / f"{process}.json"

    def log_file(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def make(self) -> None:
        """Create the folders, private to their owner."""
        for folder in (self.root, self.catalog, self.store, self.run, self.logs, self.keys, self.sockets):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def sockets(self) -> Path:
        """A folder for socket files: in the state folder, or in the temporary one where that path would be too long."""
        if len(os.fsencode(self.run / LONGEST_SOCKET_NAME)) <= MAX_SOCKET_PATH:
            return self.run
        name = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"roost-{os.getuid()}-{name}"

    def socket(self, name: str) -> str:
        """The ``ipc://`` endpoint of a socket file."""
        return f"ipc://{self.sockets / name}.sock"


def write_private(path: Path, content: bytes) -> None:
    """Replace ``path`` in one step; nobody but the owner can ever read it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
