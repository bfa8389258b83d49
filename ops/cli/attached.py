"""What servers that a node is attached to say of themselves, asked as its sidecar would ask them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from backends.interface import EngineSettings
from backends.registry import make_backend
from wire.outcomes import RoostError


class Attached(NamedTuple):
    """One server: what it can do or, where it is not ``usable``, why; and what should be known of it all the same."""

    usable: bool
    told: str
    remark: str = ""


async def examine(engines: Sequence[EngineSettings]) -> list[Attached]:
    """Ask the server of each engine that has one to be attached to. It is left as it is."""
    with tempfile.TemporaryDirectory(prefix="roost-doctor-") as scratch:
        return [await _ask(engine, Path(scratch)) for engine in engines if engine.attach]


async def _ask(engine: EngineSettings, scratch: Path) -> Attached:
    where = f"{engine.base} at {engine.attach}"
    named = msgspec.structs.replace(engine, name=engine.name or "attached")
    try:
        backend = make_backend(named, run_dir=scratch, log_dir=scratch)
        await backend.start()
        try:
            limits = await backend.limits()
            await backend.health()
        finally:
            await backend.detach()
    except RoostError as error:
        return Attached(False, f"{where}: {error.message}")
    return Attached(True, f"{where}: {limits.slots} slots of rank {limits.max_rank}", backend.detail)
