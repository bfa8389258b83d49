"""The stock SDKs, each in an environment of its own, made once below ``.cache/``."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from .rig import Rig

_ROOT = Path(__file__).parents[3]
_FOLDER = _ROOT / ".cache" / "sdk"


def _make(requirement: str) -> Path:
    """The interpreter of an environment with ``requirement`` in it.

    Torch, which custom losses need in the client, is lent by the environment of the tests: its packages come last.
    """
    home = _FOLDER / requirement.replace("==", "-")
    interpreter = home / "bin" / "python"
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with (_FOLDER / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "ready").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
            subprocess.run([str(interpreter), "-m", "pip", "install", "-q", requirement], check=True)
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            lent = home / "lib" / version / "site-packages" / "zz_lent.pth"
            lent.write_text(sysconfig.get_paths()["purelib"] + "\n")
            (home / "ready").touch()
    return interpreter


@pytest.fixture(scope="session")
def sdk() -> Callable[[str], Path]:
    """The interpreter for a requirement such as ``tinker==0.38.0``."""
    return _make


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        yield rig
