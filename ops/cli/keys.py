"""``roost keys``: API keys, and the CURVE keys of sockets that other hosts reach."""

from __future__ import annotations

from typing import Annotated

import typer

from wire.events import Scope

from ..deployment import curve_keys
from .output import tell, tell_json, tell_table, time_of
from .session import AsJson, session

app = typer.Typer(help="API keys, and CURVE keys between hosts.", no_args_is_help=True)


@app.command("create")
def create(
    context: typer.Context,
    tenant: Annotated[str, typer.Argument(help="Whose policies it reaches; * for all.")],
    scope: Annotated[
        list[Scope] | None, typer.Option(help="What it may do; repeat for more.  [default: invoke]")
    ] = None,
    label: Annotated[str, typer.Option(help="What it is for, shown in lists.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make an API key. Its secret is shown this once."""
    scopes = [one.value for one in scope or [Scope.INVOKE]]
    body = {"tenant": tenant, "scopes": scopes, "label": label}
    key = session(context).client().call("POST", "/roost/v1/keys", body)
    if as_json:
        tell_json(key)
        return
    tell("Key ", (key["key_id"], "bold"), f" for tenant {tenant} ({', '.join(scopes)}). Its secret, shown this once:")
    tell((key["secret"], "bold"))


@app.command("list")
def list_keys(
    context: typer.Context,
    tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "",
    as_json: AsJson = False,
) -> None:
    """List keys, the revoked ones too."""
    query = {"tenant": tenant} if tenant else None
    answer = session(context).client().call_pages("/roost/v1/keys", "keys", query)
    if as_json:
        tell_json(answer)
        return
    rows = [
        (
            key["key_id"], key["tenant"], ",".join(key["scopes"]), "revoked" if key["revoked"] else "valid",
            time_of(key["created_ms"]), key["label"],
        )
        for key in answer["keys"]
    ]  # fmt: skip
    tell_table(("KEY", "TENANT", "SCOPES", "STATE", "MADE", "LABEL"), rows, empty="There are no keys.")


@app.command("revoke")
def revoke(context: typer.Context, key_id: str, as_json: AsJson = False) -> None:
    """Revoke a key: the next request with it is refused."""
    answer = session(context).client().call("DELETE", f"/roost/v1/keys/{key_id}")
    if as_json:
        tell_json(answer)
    else:
        tell("Revoked " if answer["changed"] else "Was revoked already: ", (key_id, "bold"))


@app.command("curve")
def curve(context: typer.Context, as_json: AsJson = False) -> None:
    """Make the CURVE keys of this host's processes, if they are not there, and show the public ones."""
    layout = session(context).layout()
    layout.make()
    public = {process: pair.public for process, pair in curve_keys(layout).items()}
    if as_json:
        tell_json(public)
    else:
        tell_table(("PROCESS", "PUBLIC KEY"), public.items(), empty="")
        tell((f"The secret ones are in {layout.keys}, readable by their owner only.", "dim"))
