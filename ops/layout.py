"""Where a deployment keeps its things, all under one state folder that only its owner may enter."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from wire.outcomes import InvalidRequest

PRIVATE = 0o700
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
    def disk(self) -> Path:
        """Copies of artifacts that lie in an object store."""
        return self.root / "disk"

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
    def training_key(self) -> Path:
        """With which the training service asks the gateway for samples."""
        return self.keys / "training.key"

    @property
    def training(self) -> Path:
        """The training service's journal and checkpoints, and its trainer's snapshots."""
        return self.root / "training"

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

    @property
    def nodes_file(self) -> Path:
        """Where the gateway looks for nodes of other hosts, unless it is told otherwise."""
        return self.root / "nodes.toml"

    @property
    def gateway_name(self) -> Path:
        """What this host's gateway is called where the configuration does not say."""
        return self.root / "gateway.name"

    def settings_file(self, process: str) -> Path:
        return self.run / f"{process}.json"

    def log_file(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def make(self) -> None:
        """Create the folders, and close those that are there to everybody but their owner.

        Raises InvalidRequest for a folder that is another user's, or no folder at all.
        """
        for folder in (self.root, self.catalog, self.store, self.run, self.logs, self.keys):
            _make(folder)
            if stat.S_IMODE(_owned(folder, follow=True).st_mode) != PRIVATE:
                folder.chmod(PRIVATE)
        if self.sockets != self.run:
            # anybody may have made this name first, and put there what they like: it is not mended but refused
            _make(self.sockets)
            if stat.S_IMODE(_owned(self.sockets, follow=False).st_mode) != PRIVATE:
                raise InvalidRequest(f"{self.sockets} is open to other users: remove it", field="state_dir")

    @property
    def sockets(self) -> Path:
        """A folder for socket files: in the state folder, or in the temporary one where that path would be too long."""
        if len(os.fsencode(self.run / LONGEST_SOCKET_NAME)) <= MAX_SOCKET_PATH:
            return self.run
        name = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"roost-{os.getuid()}-{name}"

    def socket(self, name: str) -> str:
        """The ``ipc://`` endpoint of a socket file."""
        return f"ipc://{self.socket_file(name)}"

    def socket_file(self, name: str) -> str:
        return f"{self.sockets / name}.sock"


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"{folder} can't be made: {error.strerror}", field="state_dir") from None


def _owned(folder: Path, *, follow: bool) -> os.stat_result:
    found = folder.stat(follow_symlinks=follow)
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidRequest(f"{folder} is not a folder: remove it", field="state_dir")
    if found.st_uid != os.getuid():
        raise InvalidRequest(
            f"{folder} belongs to another user ({found.st_uid}): use --state-dir, or chown it", field="state_dir"
        )
    return found


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
