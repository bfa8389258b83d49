"""``python -m catalog --settings FILE.json``: the registrar process. SIGTERM and SIGINT end it cleanly."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

import msgspec
import uvloop

from wire.outcomes import RoostError

from .serve import serve
from .settings import RegistrarSettings


def main() -> int:
    """The exit status: 0 after a signal, 1 where it could not serve, 2 for settings that are wrong."""
    parser = argparse.ArgumentParser(prog="python -m catalog", description="The registrar: every write to the catalog.")
    parser.add_argument("--settings", type=Path, required=True, help="RegistrarSettings as JSON")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = msgspec.json.decode(arguments.settings.read_bytes(), type=RegistrarSettings)
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


async def _serve_until_signalled(settings: RegistrarSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(settings, stop)


if __name__ == "__main__":
    sys.exit(main())
