"""``python -m sidecar --settings FILE.json``: the sidecar process. SIGTERM and SIGINT detach it; engines go on."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from backends.registry import make_backend
from catalog.service import run_service

from .service import Sidecar
from .settings import SidecarSettings


def main() -> int:
    """The exit status: see ``run_service``."""
    return run_service("sidecar", "The sidecar: a node's arena and engines.", SidecarSettings, _serve)


async def _serve(settings: SidecarSettings, stop: asyncio.Event) -> None:
    run_dir, log_dir = Path(settings.run_dir), Path(settings.log_dir)
    backends = {engine.name: make_backend(engine, run_dir=run_dir, log_dir=log_dir) for engine in settings.engines}
    await Sidecar(settings, backends).run(stop)


if __name__ == "__main__":
    sys.exit(main())
