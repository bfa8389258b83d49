"""``roost status``: the processes of this host, and the fleet as the gateway sees it."""

from __future__ import annotations

from typing import Any

import msgspec
import typer

from wire.outcomes import RoostError

from ..layout import Layout
from ..supervise.state import MeshState, Phase
from .kept import kept_engines, tell_kept
from .output import EXIT_UNREACHABLE, OUT, Unreachable, tell, tell_error, tell_json
from .render import fleet_view, mesh_view
from .session import AsJson, Session, StateDir, session


def register(app: typer.Typer) -> None:
    app.command("status")(status)


def status(context: typer.Context, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Show what runs. Exits with 3 where nothing does."""
    asked = session(context)
    if state_dir:
        asked = Session(asked.url, asked.key, state_dir)
    mesh = asked.mesh()
    alive = mesh is not None and mesh.supervisor.alive
    fleet: Any = None
    trouble: RoostError | None = None
    try:
        fleet = asked.client().call("GET", "/roost/v1/status")
    except RoostError as error:
        trouble = error
    layout = asked.layout()
    if as_json:
        message = trouble.message if trouble else None
        kept = [] if alive else kept_engines(layout)
        tell_json({"supervisor": _told(mesh, alive), "kept": kept, "fleet": fleet, "error": message})
    else:
        _tell(mesh, layout, alive, fleet, trouble)
    if fleet is None and not alive:
        raise typer.Exit(EXIT_UNREACHABLE)


def _told(mesh: MeshState | None, alive: bool) -> Any:
    return None if mesh is None else {**msgspec.to_builtins(mesh), "alive": alive}


def _tell(mesh: MeshState | None, layout: Layout, alive: bool, fleet: Any, trouble: RoostError | None) -> None:
    if mesh is not None and alive:
        tell((mesh.phase, "bold"), f"  {mesh.url}")
        OUT.print(mesh_view(mesh))
    elif mesh is not None and mesh.phase not in {Phase.STOPPED, Phase.FAILED}:
        tell(("The supervisor was killed: ", "red"), "`roost up` starts anew, `roost down` ends what is left.")
    else:
        tell("No mesh runs from this folder.")
    if not alive:
        tell_kept(layout)
    if fleet is not None:
        OUT.print()
        OUT.print(fleet_view(fleet))
        if "position" in fleet["catalog"]:
            tell((f"catalog at journal position {fleet['catalog']['position']}", "dim"))
    elif alive or not isinstance(trouble, Unreachable):
        assert trouble is not None
        tell_error(trouble)
