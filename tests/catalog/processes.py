"""A real registrar process, and what talks to it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from catalog.artifacts import OWN_FOLDER, StoreLocation
from catalog.blobs import BlobStore
from catalog.client import RegistrarClient
from catalog.settings import CurveSettings, RegistrarSettings

ROOT = Path(__file__).resolve().parents[2]
START_S = 30.0


class RegistrarProcess:
    """``python -m catalog`` over ``folder``. ``prefix`` is put before the command (a tracer, say).

    With a ``journal`` in PostgreSQL, registrars of several folders may share one ``store``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        prefix: Sequence[str] = (),
        curve: CurveSettings | None = None,
        journal: str = "",
        store: Path | None = None,
        location: StoreLocation = OWN_FOLDER,
    ) -> None:
        self.folder = folder
        self.prefix = list(prefix)
        self.catalog_dir = folder / "catalog"
        self.store = BlobStore(store or folder / "store")
        # a folder deep in a test's own would make the socket's path too long
        self.endpoint = f"ipc://{folder}/r"
        self.feed_endpoint = f"ipc://{folder}/f"
        self.log = folder / "log"
        self.settings_file = folder / "settings.json"
        settings = RegistrarSettings(
            catalog_dir=str(self.catalog_dir),
            store_dir=str(store or folder / "store"),
            endpoint=self.endpoint,
            feed_endpoint=self.feed_endpoint,
            map_bytes=1 << 26,
            curve=curve,
            journal=journal,
            store=location,
        )
        self.settings_file.write_bytes(msgspec.json.encode(settings))
        self.process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> subprocess.Popen[bytes]:
        command = [*self.prefix, sys.executable, "-m", "catalog", "--settings", str(self.settings_file)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        return self.process

    def start(self) -> None:
        """Returns once it serves."""
        served = self.logged().count("registrar ready")
        process = self.spawn()
        deadline = time.monotonic() + START_S
        while self.logged().count("registrar ready") == served:
            assert process.poll() is None, self.logged()
            assert time.monotonic() < deadline, self.logged()
            time.sleep(0.02)

    def logged(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> int:
        """The exit status."""
        return self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> int:
        """To the registrar itself, which under a tracer is not the process that was spawned."""
        assert self.process is not None
        os.kill(int((self.catalog_dir / "registrar.lock").read_text()), number)
        return self.process.wait(timeout=START_S)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def client(self) -> RegistrarClient:
        return RegistrarClient(self.endpoint)


async def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Until ``condition()`` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what other processes did sets no event of ours
            await asyncio.sleep(0.01)
