"""A real registrar process for a benchmark."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from catalog.settings import RegistrarSettings

_START_S = 30.0


class RegistrarProcess:
    """``python -m catalog``, or another ``program``, over a fresh catalog in ``folder``; a context manager."""

    def __init__(self, folder: Path, *, journal: str = "", batch_max: int = 512, program: str = "catalog") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.catalog_dir = folder / "catalog"
        self.store_dir = folder / "store"
        self.endpoint = f"ipc://{folder}/registrar"
        self.feed_endpoint = f"ipc://{folder}/feed"
        self._log = folder / "log"
        self._settings = folder / "settings.json"
        settings = RegistrarSettings(
            catalog_dir=str(self.catalog_dir), store_dir=str(self.store_dir), endpoint=self.endpoint,
            feed_endpoint=self.feed_endpoint, journal=journal, batch_max=batch_max,
        )  # fmt: skip
        self._program = program
        self._settings.write_bytes(msgspec.json.encode(settings))

    def __enter__(self) -> RegistrarProcess:
        command = [sys.executable, "-m", self._program, "--settings", str(self._settings)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        while b"registrar ready" not in self._log.read_bytes():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the registrar did not start: {self._log.read_text()}")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
