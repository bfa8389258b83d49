"""``roost policy``: creating, looking at, moving and retiring policies."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from catalog.names import check_policy

from .client import policy_path
from .output import size_of, tell, tell_json, tell_table, time_of
from .session import AsJson, session

app = typer.Typer(help="Policies: tenant/name, a behaviour over a base.", no_args_is_help=True)

Policy = Annotated[str, typer.Argument(metavar="TENANT/NAME", callback=lambda text: check_policy(text))]
Expected = Annotated[
    int | None, typer.Option("--expect", metavar="VERSION", help="Only if the policy has this version.")
]
Channel = Annotated[str, typer.Option(help="The channel.")]


@app.command("create")
def create(context: typer.Context, policy: Policy, base: Annotated[str, typer.Option(help="Its base model.")],
           as_json: AsJson = False) -> None:  # fmt: skip
    """Create a policy over a registered base."""
    answer = session(context).client().call("POST", "/roost/v1/policies", {"policy": policy, "base": base})
    if as_json:
        tell_json(answer)
    else:
        tell("Created " if answer["changed"] else "Is there already: ", (policy, "bold"), f" over {base}")


@app.command("list")
def list_policies(
    context: typer.Context,
    prefix: Annotated[str, typer.Option(help="Only names that begin with this.")] = "",
    after: Annotated[str, typer.Option(help="Go on after this name.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
    as_json: AsJson = False,
) -> None:
    """List policies, in the order of their names."""
    query = {"prefix": prefix, "after": after, "limit": limit}
    answer = session(context).client().call("GET", "/roost/v1/policies", query=query)
    if as_json:
        tell_json(answer)
        return
    rows = [
        (record["policy"], record["base"], record["latest"] or "-", _channels(record["channels"], record["latest"]),
         "retired" if record["retired"] else "")
        for record in answer["policies"]
    ]  # fmt: skip
    tell_table(("POLICY", "BASE", "LATEST", "CHANNELS", ""), rows, empty="No policy yet: `roost publish --help`.")
    if answer["has_more"]:
        tell((f"More with: --after {answer['policies'][-1]['policy']}", "dim"))


@app.command("show")
def show(context: typer.Context, policy: Policy, as_json: AsJson = False) -> None:
    """Show a policy with its channels and revisions."""
    record = session(context).client().call("GET", policy_path(policy))
    if as_json:
        tell_json(record)
        return
    retired = "  retired" if record["retired"] else ""
    tell((record["policy"], "bold"), f"  over {record['base']}  version {record['version']}{retired}")
    tell(f"channels: {_channels(record['channels'], record['latest'])}")
    rows = [
        (
            f"@{revision['revision']}", revision["digest"][:12], size_of(revision["size"]), revision["rank"],
            ",".join(revision["targets"]), time_of(revision["published_ms"]), revision["provenance"].get("source", ""),
        )
        for revision in record["revisions"]
    ]  # fmt: skip
    columns = ("REVISION", "DIGEST", "SIZE", "RANK", "TARGETS", "PUBLISHED", "FROM")
    tell_table(columns, rows, empty=f"No revision yet: `roost publish {policy} FOLDER`.")


@app.command("where")
def where(context: typer.Context, policy: Policy, as_json: AsJson = False) -> None:
    """Show where each revision's bytes are: the store, a node's memory, an engine's slot."""
    answer = session(context).client().call("GET", policy_path(policy, "where"))
    if as_json:
        tell_json(answer)
        return
    rows = [
        (f"{policy}@{revision['revision']}", revision["digest"][:12], size_of(revision["size"]),
         "yes" if revision["in_store"] else "MISSING", _places(revision["nodes"]), _slots(revision["nodes"]))
        for revision in answer["revisions"]
    ]  # fmt: skip
    columns = ("REVISION", "DIGEST", "SIZE", "STORE", "NODES", "ENGINE SLOTS")
    tell_table(columns, rows, empty=f"{policy} has no revision yet.")


@app.command("history")
def history(context: typer.Context, policy: Policy, as_json: AsJson = False) -> None:
    """Show everything that happened to a policy, from the journal."""
    answer = session(context).client().call("GET", policy_path(policy, "history"))
    if as_json:
        tell_json(answer)
        return
    rows = [
        (event["seq"], time_of(event["at_ms"]), event["actor"] or "-", _what(event["body"]))
        for event in answer["events"]
    ]
    tell_table(("SEQ", "WHEN", "BY", "WHAT"), rows, empty="Nothing happened yet.")


@app.command("rollback")
def rollback(
    context: typer.Context,
    policy: Policy,
    to: Annotated[int, typer.Option(min=0, help="This revision.  [default: the one before]")] = 0,
    channel: Channel = "stable",
    expect: Expected = None,
    as_json: AsJson = False,
) -> None:
    """Point a channel at an earlier revision."""
    body = {"channel": channel, "to": to, "expected_version": expect}
    answer = session(context).client().call("POST", policy_path(policy, "rollback"), body)
    if as_json:
        tell_json(answer)
    else:
        tell((f"{policy}:{channel}", "bold"), f" is revision {answer['revision']} now")


@app.command("move")
def move(
    context: typer.Context,
    policy: Policy,
    target: Annotated[
        list[str] | None, typer.Argument(metavar="[REVISION[:WEIGHT]]...", help="Nothing: follow latest again.")
    ] = None,
    channel: Channel = "stable",
    expect: Expected = None,
    as_json: AsJson = False,
) -> None:
    """Point a channel at a revision, or split it between several: `move acme/support 7:95 8:5`."""
    arms = [_arm(text) for text in target or ()]
    body = {"target": arms, "expected_version": expect}
    answer = session(context).client().call("PUT", policy_path(policy, "channels", channel), body)
    if as_json:
        tell_json(answer)
    else:
        shown = (
            ", ".join(f"revision {arm['revision']} (weight {arm['weight']})" for arm in arms) or "latest, as it comes"
        )
        tell((f"{policy}:{channel}", "bold"), f" is {shown}")


@app.command("remove-channel")
def remove_channel(
    context: typer.Context,
    policy: Policy,
    channel: Annotated[str, typer.Argument(help="Not stable, which every policy has.")],
    expect: Expected = None,
    as_json: AsJson = False,
) -> None:
    """Remove a channel: requests for it are answered with 404 from then on."""
    query = {"expected_version": expect} if expect is not None else None
    answer = session(context).client().call("DELETE", policy_path(policy, "channels", channel), query=query)
    if as_json:
        tell_json(answer)
    else:
        tell("Removed ", (f"{policy}:{channel}", "bold"))


@app.command("retire")
def retire(context: typer.Context, policy: Policy, expect: Expected = None, as_json: AsJson = False) -> None:
    """Retire a policy: it is not served any more, and its name stays taken."""
    answer = session(context).client().call("POST", policy_path(policy, "retire"), {"expected_version": expect})
    if as_json:
        tell_json(answer)
    else:
        tell("Retired " if answer["changed"] else "Was retired already: ", (policy, "bold"))


def _arm(text: str) -> dict[str, int]:
    revision, _, weight = text.partition(":")
    if not revision.isdigit() or not (weight or "1").isdigit():
        raise typer.BadParameter(f"{text!r}: expected REVISION or REVISION:WEIGHT, whole numbers")
    return {"revision": int(revision), "weight": int(weight or 1)}


def _channels(channels: dict[str, list[dict[str, int]]], latest: int) -> str:
    """``stable=3 canary=3:90,4:10``; a channel without a target follows latest."""
    told = []
    for name, target in channels.items():
        if not target:
            told.append(f"{name}={latest or '-'} (latest)")
        elif len(target) == 1:
            told.append(f"{name}={target[0]['revision']}")
        else:
            told.append(f"{name}=" + ",".join(f"{arm['revision']}:{arm['weight']}" for arm in target))
    return " ".join(told)


def _places(nodes: list[dict[str, Any]]) -> str:
    return ", ".join(f"{node['node']}: {node['residency']}" for node in nodes) or "-"


def _slots(nodes: list[dict[str, Any]]) -> str:
    return ", ".join(engine for node in nodes for engine in node["engines"]) or "-"


def _what(body: dict[str, Any]) -> str:
    """An event in a few words."""
    match body["t"]:
        case "PolicyCreated":
            return f"created over {body['base']}"
        case "RevisionPublished":
            return f"published revision {body['revision']} ({body['artifact']['digest'][:12]})"
        case "ChannelMoved" if body.get("target"):
            arms = ", ".join(f"{arm['revision']} (weight {arm['weight']})" for arm in body["target"])
            return f"moved {body['channel']} to {arms}"
        case "ChannelMoved":
            return f"let {body['channel']} follow latest"
        case "ChannelRemoved":
            return f"removed {body['channel']}"
        case "PolicyRetired":
            return "retired"
        case other:
            return str(other)
