"""``roost base``: the base models that policies are trained over."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated

import typer

from catalog.names import check_base
from packer.fingerprint import fingerprint

from .output import tell, tell_json, tell_table, time_of
from .progress import byte_progress
from .session import AsJson, session

app = typer.Typer(help="Base models.", no_args_is_help=True)


@app.command("add")
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What requests and policies call it.")],
    path: Annotated[Path, typer.Argument(help="The model's folder: config.json, tokenizer, safetensors.")],
    group: Annotated[str, typer.Option(help="Compatibility group: bases that run each other's adapters.")] = "",
    as_json: AsJson = False,
) -> None:
    """Register a base model under a name, by the fingerprint of its files."""
    folder = path.expanduser().absolute()
    check_base(name, "name")
    with byte_progress(f"Reading {name}") as progress:
        found = fingerprint(folder, progress)
    body = {
        "name": name,
        "path": str(folder),
        "fingerprint": found.value,
        "config": base64.b64encode(found.config).decode(),
        "group": group,
    }
    answer = session(context).client().call("POST", "/roost/v1/bases", body)
    if as_json:
        tell_json({"name": name, "fingerprint": found.value, "changed": answer["changed"]})
    else:
        done = "Registered" if answer["changed"] else "Known already:"
        tell(f"{done} ", (name, "bold"), f", fingerprint {found.value[:12]}")
        tell(("An engine for it is started by `roost up --base` or [[node.engines]] in roost.toml.", "dim"))


@app.command("list")
def list_bases(context: typer.Context, as_json: AsJson = False) -> None:
    """List the registered bases."""
    answer = session(context).client().call("GET", "/roost/v1/bases")
    if as_json:
        tell_json(answer)
        return
    rows = [
        (base["name"], base["fingerprint"][:12], time_of(base["created_ms"]), base["path"]) for base in answer["bases"]
    ]
    tell_table(
        ("BASE", "FINGERPRINT", "SINCE", "PATH"), rows, empty="No base is registered: `roost base add NAME PATH`."
    )
