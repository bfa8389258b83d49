"""``python -m gateway --settings FILE.json``: one gateway process. SIGTERM and SIGINT have it drain and end."""

from __future__ import annotations

import sys

from catalog.service import run_service

from .app import run
from .settings import GatewaySettings


def main() -> int:
    """The exit status: see ``run_service``."""
    return run_service("gateway", "Roost's front door.", GatewaySettings, run)


if __name__ == "__main__":
    sys.exit(main())
