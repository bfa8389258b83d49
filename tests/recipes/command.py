"""``roost recipe`` at a mesh of the test's own, as a process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.ops.training_mesh import Client

RUN_S = 240.0


def written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


async def start(mesh: Client, name: str, text: str, folder: Path) -> asyncio.subprocess.Process:
    """``roost recipe NAME`` as a process of its own."""
    file = written(folder / f"{name}.toml", text)
    running = mesh.running
    secret = running.layout.admin_key.read_text().strip()
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ops.cli", "--url", running.mesh.url, "recipe", name, str(file), "--json",
        env=os.environ | {"ROOST_API_KEY": secret}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def told(process: asyncio.subprocess.Process, within_s: float = RUN_S) -> Any:
    """What it printed, once it ended well."""
    async with asyncio.timeout(within_s):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out)
