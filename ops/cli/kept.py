"""Engines that run on without a mesh: what ``roost down --keep-engines`` or a killed supervisor left."""

from __future__ import annotations

from typing import Any

from backends.process import running

from ..layout import Layout
from .output import tell


def kept_engines(layout: Layout) -> list[dict[str, Any]]:
    """The engines of the state folder that run, for --json."""
    return [{"engine": record.name, "pid": record.pid} for record in running(layout.run)]


def tell_kept(layout: Layout) -> None:
    for record in running(layout.run):
        tell(f"Engine {record.name} runs on (pid {record.pid}): `roost up` adopts it, `roost down` ends it.")
