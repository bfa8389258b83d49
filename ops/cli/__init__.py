"""The ``roost`` command. Each module is one group of commands; ``main`` is the entry point."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from wire.outcomes import RoostError

from . import (
    base,
    catalog,
    chat,
    config,
    doctor,
    garbage,
    keys,
    loadtest,
    logs,
    node,
    pack,
    policy,
    publish,
    recipe,
    status,
    up,
)
from .output import exit_code, tell_error
from .session import Session

app = typer.Typer(
    name="roost",
    help="Serve many LoRA policies on a few resident base models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for part in (up, status, logs, publish, chat, pack, garbage, doctor):
    part.register(app)
app.add_typer(base.app, name="base")
app.add_typer(policy.app, name="policy")
app.add_typer(node.app, name="node")
app.add_typer(keys.app, name="keys")
app.add_typer(config.app, name="config")
app.add_typer(catalog.app, name="catalog")
app.add_typer(loadtest.app, name="loadtest")
app.add_typer(recipe.app, name="recipe")


@app.callback()
def options(
    context: typer.Context,
    url: Annotated[str, typer.Option(envvar="ROOST_URL", help="The gateway.  [default: this folder's mesh]")] = "",
    api_key: Annotated[
        str, typer.Option(envvar="ROOST_API_KEY", help="API key.  [default: the admin key of this folder's mesh]")
    ] = "",
    state_dir: Annotated[str, typer.Option(help="State folder.  [default: what roost.toml says, else .roost]")] = "",
) -> None:
    context.obj = Session(url=url, key=api_key, state_dir=state_dir)


def main() -> None:
    """Run a command. An error is one line on stderr and an exit code that scripts can tell apart."""
    try:
        app()
    except RoostError as error:
        tell_error(error)
        sys.exit(exit_code(error))
    except BrokenPipeError:
        # whoever read our output has gone (`roost logs | head`): not an error, and nothing to flush into
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
