"""``python -m gateway --settings FILE.json``: one gateway process."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import msgspec
import uvloop

from wire.outcomes import RoostError

from .app import run
from .settings import GatewaySettings


def main() -> int:
    """Run until told to stop. 2 where the settings can't stand, 1 where the port can't be had."""
    parser = argparse.ArgumentParser(prog="python -m gateway", description="Roost's front door")
    parser.add_argument("--settings", type=Path, required=True, help="a JSON file of gateway settings")
    path: Path = parser.parse_args().settings
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = msgspec.json.decode(path.read_bytes(), type=GatewaySettings)
        uvloop.run(run(settings))
    except (msgspec.DecodeError, RoostError) as error:
        print(f"gateway: {path}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
