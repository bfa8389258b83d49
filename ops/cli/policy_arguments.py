"""What the commands on policies have in common."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from catalog.names import check_policy

from .client import policy_path
from .output import tell, tell_json
from .session import session

Policy = Annotated[str, typer.Argument(metavar="TENANT/NAME", callback=lambda text: check_policy(text))]
Expected = Annotated[
    int | None, typer.Option("--expect", metavar="VERSION", help="Only if the policy has this version.")
]
Channel = Annotated[str, typer.Option(help="The channel.")]


def ask_change(
    context: typer.Context, method: str, policy: str, rest: tuple[str, ...], body: dict[str, Any], expect: int | None
) -> Any:
    """Ask the gateway to change a policy; what it committed. Without a body what is asked for is in the query."""
    path = policy_path(policy, *rest)
    client = session(context).client()
    if method == "DELETE":
        query = body if expect is None else body | {"expected_version": expect}
        return client.call(method, path, query=query)
    return client.call(method, path, body | {"expected_version": expect})


def tell_change(answer: Any, as_json: bool, *sentence: str | tuple[str, str]) -> None:
    """``sentence`` for a person, or the answer as it is."""
    if as_json:
        tell_json(answer)
    else:
        tell(*sentence)
