"""What the registrar, the sidecar and the gateway have in common as processes: settings, log, signals, exit status."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import uvloop

from wire.outcomes import InvalidRequest, RoostError

ENDED, FAILED, WRONG_SETTINGS = 0, 1, 2

Settings = TypeVar("Settings", bound=msgspec.Struct)


def run_service(
    name: str, description: str, kind: type[Settings], serve: Callable[[Settings, asyncio.Event], Awaitable[None]]
) -> int:
    """Run ``serve`` on the settings that ``--settings FILE.json`` names, until SIGTERM or SIGINT set its event.

    Returns the exit status: 0 after a signal, 1 where it could not serve, 2 for settings that can't stand. Why is one
    line of the log.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument("--settings", type=Path, required=True, help=f"{kind.__name__} as JSON")
    path: Path = parser.parse_args().settings
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    log = logging.getLogger(name)
    try:
        settings = msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        log.error("settings %s: %s", path, error)
        return WRONG_SETTINGS
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_until_signalled(settings, serve))
        except InvalidRequest as error:
            log.error("settings %s: %s", path, error.message)
            return WRONG_SETTINGS
        except RoostError as error:
            log.error("%s", error.message)
            return FAILED
        except OSError as error:
            log.error("%s", error)
            return FAILED
    return ENDED


async def _until_signalled(settings: Settings, serve: Callable[[Settings, asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(settings, stop)
