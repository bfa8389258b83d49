"""``python -m catalog --settings FILE.json``: the registrar process. SIGTERM and SIGINT end it cleanly."""

from __future__ import annotations

import sys

from .collector import collecting_rarely
from .serve import serve
from .service import run_service
from .settings import RegistrarSettings


def main() -> int:
    """The exit status: see ``run_service``."""
    with collecting_rarely():
        return run_service("catalog", "The registrar: every write to the catalog.", RegistrarSettings, serve)


if __name__ == "__main__":
    sys.exit(main())
