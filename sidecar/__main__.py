"""``python -m sidecar --settings FILE.json``: the sidecar process. SIGTERM and SIGINT detach it; engines go on."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

import msgspec
import uvloop

from backends.registry import make_backend
from wire.outcomes import RoostError

from .service import Sidecar
from .settings import SidecarSettings


def main() -> int:
    """The exit status: 0 after a signal, 1 where it could not serve, 2 for settings that are wrong."""
    parser = argparse.ArgumentParser(prog="python -m sidecar", description="The sidecar: a node's arena and engines.")
    parser.add_argument("--settings", type=Path, required=True, help="SidecarSettings as JSON")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = msgspec.json.decode(arguments.settings.read_bytes(), type=SidecarSettings)
    except (OSError, msgspec.MsgspecError) as error:
        logging.error("settings %s: %s", arguments.settings, error)
        return 2
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve_until_signalled(settings))
        except RoostError as error:
            logging.error("%s", error.message)
            return 1
    return 0


async def _serve_until_signalled(settings: SidecarSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    run_dir, log_dir = Path(settings.run_dir), Path(settings.log_dir)
    backends = {engine.name: make_backend(engine, run_dir=run_dir, log_dir=log_dir) for engine in settings.engines}
    await Sidecar(settings, backends).run(stop)


if __name__ == "__main__":
    sys.exit(main())
