"""``roost config``: look at the configuration before anything is started with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import tomli_w
import typer

from ..config import load, show
from ..deployment import engine_settings, needs_curve
from .output import tell, tell_json
from .session import AsJson, default_file

app = typer.Typer(help="roost.toml: check it, show what is in force.", no_args_is_help=True)

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", envvar="ROOST_CONFIG", metavar="FILE", help="[default: roost.toml, if it is here]"),
]


@app.command("check")
def check(config: ConfigFile = None) -> None:
    """Check the configuration. Names the field that is wrong, and exits with 2."""
    file = config or default_file()
    found = load(file, os.environ)
    engines = engine_settings(found.node, {engine.base: "" for engine in found.node.engines})
    tell(
        ("ok", "green"), f"  {file or 'defaults and environment'}: {len(engines)} engine(s), state in {found.state_dir}"
    )
    for engine in engines:
        tell(f"  engine {engine.name}: {engine.base}, {engine.slots} slots up to rank {engine.max_rank}")
    if needs_curve(found):
        tell("  tcp endpoints: CURVE keys are used (`roost keys curve` shows them)")


@app.command("show")
def show_config(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Show the configuration in force: defaults, file and environment together."""
    tree = show(load(config or default_file(), os.environ))
    if as_json:
        tell_json(tree)
    else:
        typer.echo(tomli_w.dumps(tree), nl=False)
