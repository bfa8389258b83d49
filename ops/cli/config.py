"""``roost config``: look at the configuration before anything is started with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import tomli_w
import typer

from backends.registry import check_settings
from wire.outcomes import InvalidRequest

from ..config import load, show
from ..deployment import check_trained, engine_settings, needs_curve
from ..layout import Layout
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
    bases = {engine.base: "" for engine in found.node.engines}
    engines = engine_settings(found.node, bases)
    for index, told in enumerate(found.node.engines):
        alone = msgspec.structs.replace(found.node, engines=(told,))
        try:
            check_settings(engine_settings(alone, bases)[0])
        except InvalidRequest as error:
            path = f"node.engines[{index}].{error.field}"
            raise InvalidRequest(f"{path}: {error.message}", field=path) from None
    check_trained(found, Layout.of(found.state_dir))
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
