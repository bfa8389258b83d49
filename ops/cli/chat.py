"""``roost chat``: talk to a policy, a revision, a channel or a base, and watch the answer come."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from wire.outcomes import RoostError

from .client import ApiClient
from .output import ERR, tell_error
from .session import session

Message = dict[str, str]

# what a terminal would obey: a model may have been made to write anything
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def register(app: typer.Typer) -> None:
    app.command("chat")(chat)


def chat(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="POLICY", help="tenant/name, with @REVISION or :CHANNEL, or a base.")],
    message: Annotated[str | None, typer.Argument(help="Without it: a conversation, until Ctrl-D.")] = None,
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.0,
) -> None:
    """Send a message and print the answer as it is generated."""
    client = session(context).client()
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    options = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    if message is not None:
        _ask(client, options, [*messages, {"role": "user", "content": message}])
        return
    while (asked := _prompt()) is not None:
        messages.append({"role": "user", "content": asked})
        try:
            messages.append({"role": "assistant", "content": _ask(client, options, messages)})
        except RoostError as error:
            # the conversation goes on without the turn that failed
            tell_error(error)
            messages.pop()


def _ask(client: ApiClient, options: dict[str, object], messages: list[Message]) -> str:
    """Print the answer piece by piece; returns the whole of it."""
    body = {**options, "messages": messages, "stream": True}
    told = []
    for event in client.stream("/v1/chat/completions", body):
        for choice in event.get("choices", ()):
            piece = choice.get("delta", {}).get("content") or ""
            told.append(piece)
            sys.stdout.write(_CONTROLS.sub("", piece) if sys.stdout.isatty() else piece)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return "".join(told)


def _prompt() -> str | None:
    """The next line that says something; None at the end of the input."""
    if sys.stdin.isatty():
        ERR.print("> ", end="", style="bold")
    for line in sys.stdin:
        if line.strip():
            return line.strip()
    return None
