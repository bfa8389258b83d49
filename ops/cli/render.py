"""How the mesh looks: the same picture for ``up``, while it starts, and for ``status``."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group
from rich.text import Text

from ..supervise.state import MeshState, Phase
from .output import make_table, size_of

STYLES = {
    Phase.READY: "green", Phase.STARTING: "yellow", Phase.RESTARTING: "red", Phase.FAILED: "red",
    Phase.STOPPING: "yellow", Phase.STOPPED: "dim",
}  # fmt: skip
ENGINE_STYLES = {"ready": "green", "starting": "yellow", "dead": "red"}


def mesh_view(state: MeshState, note: str = "") -> Group:
    """Processes and engines, each with how it is."""
    rows = [
        (
            Text(process.name),
            Text(process.phase, STYLES[process.phase]),
            process.identity.pid if process.identity is not None else "-",
            _age(process.since),
            process.restarts or "",
            process.detail if process.phase is not Phase.READY else "",
        )
        for process in state.processes
    ]
    rows += [
        (
            Text(f"engine {engine.name}"),
            Text(engine.health, ENGINE_STYLES.get(engine.health, "")),
            engine.pid or "-",
            _age(engine.since) if engine.since else "",
            engine.restarts or "",
            engine.detail or engine.base,
        )
        for engine in state.engines
    ]
    if state.keeper is not None:
        kept = ("ready", "green") if state.keeper.alive else ("dead", "red")
        rows.append((Text("keeper"), Text(*kept), state.keeper.pid, "", "", "restarts the supervisor"))
    parts: list[Any] = [make_table(("PROCESS", "STATE", "PID", "FOR", "RESTARTS", ""), rows)]
    if note:
        parts.append(Text(note, "dim"))
    return Group(*parts)


def fleet_view(fleet: dict[str, Any]) -> Group:
    """What the gateway knows of the nodes: slots, the arena, loads."""
    rows = []
    for node in fleet["nodes"]:
        arena = f"{size_of(node['arena_used'])} of {size_of(node['arena_bytes'])}"
        loads = f"{node['loads_in_flight']} loading, {node['loads_queued']} queued"
        state = "silent" if not node["heard"] else "cordoned" if node["draining"] else "heard"
        rows.append((node["node"], state, arena, loads, ""))
        for engine in node["engines"]:
            names = [
                name for adapter in engine["serving"] for name in adapter["references"] or [adapter["digest"][:12]]
            ]
            slots = f"{engine['slots_used']} of {engine['slots']} slots"
            rows.append((f"  {engine['engine']}", engine["health"], slots, engine["base"], " ".join(names)))
    return Group(make_table(("NODE / ENGINE", "STATE", "MEMORY / SLOTS", "LOADS / BASE", "SERVING"), rows))


def _age(since: float) -> str:
    seconds = max(0, int(time.time() - since))
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"
