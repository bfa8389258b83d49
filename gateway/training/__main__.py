"""``python -m gateway.training --settings FILE.json``: one training service. SIGTERM and SIGINT end it."""

from __future__ import annotations

import sys

from catalog.service import run_service

from .service import run
from .settings import TrainingSettings


def main() -> int:
    """The exit status: see ``run_service``."""
    return run_service("gateway.training", "Roost's training API.", TrainingSettings, run)


if __name__ == "__main__":
    sys.exit(main())
