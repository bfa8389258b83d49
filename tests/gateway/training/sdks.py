"""The stock SDKs, each in an environment of its own, made once below ``.cache/``; and a client run in one."""

from __future__ import annotations

import asyncio
import fcntl
import json
import subprocess
import sys
import sysconfig
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.gateway.fleet_states import BASE

# what is installed, and what is imported
SDKS = {"tinker==0.38.0": "tinker", "tinker==0.22.0": "tinker", "mindlab-toolkit==0.2.0": "mint"}
CLIENT = Path(__file__).parent / "sdk" / "client.py"
_ROOT = Path(__file__).parents[3]
_FOLDER = _ROOT / ".cache" / "sdk"


def environment(requirement: str) -> Path:
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


async def run_client(
    interpreter: Path, module: str, url: str, secret: str, *, at_half: Callable[[], Awaitable[None]], rate: float = 0.1
) -> dict[str, Any]:
    """What the client saw. ``at_half`` runs while operations of it are under way."""
    client = await asyncio.create_subprocess_exec(
        str(interpreter), str(CLIENT), module, url, secret, BASE, str(rate),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout is not None and client.stdin is not None
    while (line := await client.stdout.readline()) != b"half\n":
        if not line:
            _, err = await client.communicate()
            raise AssertionError(err.decode())
    await at_half()
    out, err = await client.communicate(b"go on\n")
    assert client.returncode == 0, err.decode()
    return json.loads(out.splitlines()[-1])  # type: ignore[no-any-return]
