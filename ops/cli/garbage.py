"""``roost gc``: artifacts that nothing names any more."""

from __future__ import annotations

from typing import Annotated

import typer

from .output import size_of, tell, tell_json
from .session import AsJson, session


def register(app: typer.Typer) -> None:
    app.command("gc")(collect)


def collect(
    context: typer.Context,
    grace: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long a condemned artifact stays.")
    ] = 86_400.0,
    ignore_silent: Annotated[
        bool, typer.Option("--ignore-silent", help="Go on without nodes that are silent.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Condemn artifacts that no revision names, and remove those whose time of grace has passed.

    None goes that a node holds or fetches, and one that a revision names again in the meantime stays.
    """
    body = {"grace_s": grace, "ignore_silent": ignore_silent}
    answer = session(context).client().call("POST", "/roost/v1/artifacts/collect", body)
    if as_json:
        tell_json(answer)
        return
    tell(
        f"Condemned {answer['condemned']} artifacts; removed {answer['removed']} files, {size_of(answer['bytes'])}, "
        f"of which {answer['forgotten']} had been condemned before"
    )
