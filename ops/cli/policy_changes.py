"""``roost policy``: moving channels, and what a policy is called."""

from __future__ import annotations

from typing import Annotated

import typer

from catalog.names import check_policy

from .policy_arguments import Channel, Expected, Policy, ask_change, tell_change
from .session import AsJson


def register(app: typer.Typer) -> None:
    for command in (move, promote, rollback, retire, restore, rename, label):
        app.command(command.__name__)(command)
    app.command("free-name")(free_name)
    app.command("remove-channel")(remove_channel)


def rollback(
    context: typer.Context,
    policy: Policy,
    to: Annotated[int, typer.Option(min=0, help="This revision.  [default: what it served before]")] = 0,
    channel: Channel = "stable",
    expect: Expected = None,
    as_json: AsJson = False,
) -> None:
    """Point a channel back at what it served before, or at an earlier revision.

    Again, and it goes further back: through what the channel was moved to, then through lower revisions.
    """
    answer = ask_change(context, "POST", policy, ("rollback",), {"channel": channel, "to": to}, expect)
    number = answer["revision"]
    shown = f" is revision {number} now" if number else " is split as it was before"
    tell_change(answer, as_json, (f"{policy}:{channel}", "bold"), shown)


def promote(
    context: typer.Context,
    policy: Policy,
    source: Annotated[str, typer.Option("--from", metavar="CHANNEL", help="What this channel has now.")] = "",
    revision: Annotated[int, typer.Option(min=0, help="This revision.")] = 0,
    channel: Channel = "stable",
    expect: Expected = None,
    as_json: AsJson = False,
) -> None:
    """Give a channel what another has: `promote acme/support --from canary`."""
    if bool(source) == bool(revision):
        raise typer.BadParameter("say what to promote: --from CHANNEL or --revision NUMBER")
    body = {"channel": channel, "source": source, "revision": revision}
    answer = ask_change(context, "POST", policy, ("promote",), body, expect)
    tell_change(answer, as_json, (f"{policy}:{channel}", "bold"), f" is revision {answer['revision']} now")


def move(
    context: typer.Context,
    policy: Policy,
    target: Annotated[
        list[str] | None, typer.Argument(metavar="[REVISION[:WEIGHT]]...", help="Nothing: follow latest again.")
    ] = None,
    channel: Channel = "stable",
    seed: Annotated[
        int | None, typer.Option(min=0, help="Deals users to the arms anew.  [default: the seed that it has]")
    ] = None,
    expect: Expected = None,
    as_json: AsJson = False,
) -> None:
    """Point a channel at a revision, or split it between several: `move acme/support 7:95 8:5`.

    A user or session stays on one arm of a split, and a change of weights moves as few of them as it can.
    """
    arms = [_arm(text) for text in target or ()]
    body = {"target": arms, "seed": seed}
    answer = ask_change(context, "PUT", policy, ("channels", channel), body, expect)
    shown = ", ".join(f"revision {arm['revision']} (weight {arm['weight']})" for arm in arms) or "latest, as it comes"
    tell_change(answer, as_json, (f"{policy}:{channel}", "bold"), f" is {shown}")


def remove_channel(
    context: typer.Context,
    policy: Policy,
    channel: Annotated[str, typer.Argument(help="Not stable, which every policy has.")],
    expect: Expected = None,
    as_json: AsJson = False,
) -> None:
    """Remove a channel: requests for it are answered with 404 from then on."""
    answer = ask_change(context, "DELETE", policy, ("channels", channel), {}, expect)
    tell_change(answer, as_json, "Removed ", (f"{policy}:{channel}", "bold"))


def retire(context: typer.Context, policy: Policy, expect: Expected = None, as_json: AsJson = False) -> None:
    """Retire a policy: it is not served any more, and its name stays taken."""
    answer = ask_change(context, "POST", policy, ("retire",), {}, expect)
    tell_change(answer, as_json, "Retired " if answer["changed"] else "Was retired already: ", (policy, "bold"))


def restore(context: typer.Context, policy: Policy, expect: Expected = None, as_json: AsJson = False) -> None:
    """Serve a retired policy again, as it was."""
    answer = ask_change(context, "POST", policy, ("restore",), {}, expect)
    tell_change(answer, as_json, "Restored " if answer["changed"] else "Was not retired: ", (policy, "bold"))


def rename(
    context: typer.Context,
    policy: Policy,
    to: Annotated[str, typer.Argument(metavar="TENANT/NEW-NAME", callback=lambda text: check_policy(text, "to"))],
    expect: Expected = None,
    as_json: AsJson = False,
) -> None:
    """Give a policy another name within its tenant. The former name goes on standing for it."""
    answer = ask_change(context, "POST", policy, ("rename",), {"to": to}, expect)
    tell_change(answer, as_json, (policy, "bold"), " is called ", (to, "bold"), " now; the former name forwards to it")


def free_name(
    context: typer.Context,
    policy: Policy,
    former: Annotated[
        str, typer.Argument(metavar="TENANT/FORMER-NAME", callback=lambda text: check_policy(text, "former"))
    ],
    expect: Expected = None,
    as_json: AsJson = False,
) -> None:
    """Let a former name of a policy forward to it no more, so that another may have it."""
    answer = ask_change(context, "DELETE", policy, ("forwards", former.partition("/")[2]), {}, expect)
    tell_change(answer, as_json, (former, "bold"), f" stands for {policy} no more")


def label(
    context: typer.Context,
    policy: Policy,
    labels: Annotated[list[str], typer.Argument(metavar="KEY=VALUE | KEY-", help="KEY- removes a label.")],
    expect: Expected = None,
    as_json: AsJson = False,
) -> None:
    """Set labels and remove others: `label acme/support team=search stage-`."""
    kept: dict[str, str] = {}
    removed: list[str] = []
    for text in labels:
        key, equals, value = text.partition("=")
        if equals:
            kept[key] = value
        elif text.endswith("-"):
            removed.append(text[:-1])
        else:
            raise typer.BadParameter(f"{text!r}: expected KEY=VALUE, or KEY- to remove a label")
    answer = ask_change(context, "POST", policy, ("labels",), {"labels": kept, "remove": removed}, expect)
    tell_change(answer, as_json, "Labelled " if answer["changed"] else "Has these labels already: ", (policy, "bold"))


def _arm(text: str) -> dict[str, int]:
    revision, _, weight = text.partition(":")
    if not revision.isdigit() or not (weight or "1").isdigit():
        raise typer.BadParameter(f"{text!r}: expected REVISION or REVISION:WEIGHT, whole numbers")
    return {"revision": int(revision), "weight": int(weight or 1)}
