"""``roost policy``: creating policies, finding them and looking at them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import policy_changes, policy_keeping
from .client import policy_path
from .events import retention, what_happened
from .output import size_of, tell, tell_json, tell_table, time_of
from .policy_arguments import Policy
from .session import AsJson, session

app = typer.Typer(help="Policies: tenant/name, a behaviour over a base.", no_args_is_help=True)
policy_changes.register(app)
policy_keeping.register(app)


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
    label: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only with this label.")] = None,
    base: Annotated[str, typer.Option(help="Only over this base.")] = "",
    after: Annotated[str, typer.Option(help="Go on after this name.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
    as_json: AsJson = False,
) -> None:
    """List policies, in the order of their names."""
    query = {"prefix": prefix, "label": label or [], "base": base, "after": after, "limit": limit}
    answer = session(context).client().call("GET", "/roost/v1/policies", query=query)
    if as_json:
        tell_json(answer)
        return
    rows = [
        (record["policy"], record["base"], record["latest"] or "-", _channels(record["channels"], record["latest"]),
         _labels(record["labels"]), "retired" if record["retired"] else "")
        for record in answer["policies"]
    ]  # fmt: skip
    tell_table(
        ("POLICY", "BASE", "LATEST", "CHANNELS", "LABELS", ""), rows, empty="No policy yet: `roost publish --help`."
    )
    if answer["has_more"]:
        tell((f"More with: --after {answer['after']}", "dim"))


@app.command("show")
def show(context: typer.Context, policy: Policy, as_json: AsJson = False) -> None:
    """Show a policy with its channels and revisions."""
    record = session(context).client().call_pages(policy_path(policy), "revisions")
    if as_json:
        tell_json(record)
        return
    retired = "  retired" if record["retired"] else ""
    tell((record["policy"], "bold"), f"  over {record['base']}  version {record['version']}{retired}")
    tell(f"channels: {_channels(record['channels'], record['latest'])}")
    if record["labels"]:
        tell(f"labels: {_labels(record['labels'])}")
    if record["former"]:
        tell(f"former names: {' '.join(record['former'])}")
    if record["writer"]:
        tell(f"written by: training run {record['writer']}")
    if record["retention"]:
        tell(f"keeps: {retention(record['retention'])}")
    rows = [
        (
            f"@{revision['revision']}", revision["digest"][:12], size_of(revision["size"]), revision["rank"],
            ",".join(revision["targets"]), time_of(revision["published_ms"]), revision["provenance"].get("source", ""),
            "retired" if revision["retired_ms"] else "",
        )
        for revision in record["revisions"]
    ]  # fmt: skip
    columns = ("REVISION", "DIGEST", "SIZE", "RANK", "TARGETS", "PUBLISHED", "FROM", "")
    tell_table(columns, rows, empty=f"No revision yet: `roost publish {policy} FOLDER`.")
    for checkpoint in record["checkpoints"]:
        tell(f"checkpoint {checkpoint['uri']}  step {checkpoint['step']}  {time_of(checkpoint['retained_ms'])}")


@app.command("where")
def where(context: typer.Context, policy: Policy, as_json: AsJson = False) -> None:
    """Show what can run a policy, what a trainer restores, which revisions are in use, and where the bytes are."""
    answer = session(context).client().call_pages(policy_path(policy, "where"), "revisions")
    if as_json:
        tell_json(answer)
        return
    base, checkpoint = answer["base"], answer["checkpoint"]
    engines = ", ".join(
        f"{run['engine']} on {run['node']} ({run['health']}{_unfit(run)})" for run in base["deployments"]
    )
    tell("runs on: ", (base["name"], "bold"), f" {base['fingerprint'][:12]}: {engines or 'deployed nowhere'}")
    tell(f"a trainer restores: {_record(checkpoint) if checkpoint else 'nothing: it keeps no checkpoint'}")
    tell(f"channels use: {' '.join(_used(name, arms) for name, arms in answer['channels'].items())}")
    for rollout in answer["rollouts"]:
        tell(f"rollout: {_record(rollout)}")
    rows = [
        (f"{answer['policy']}@{revision['revision']}", revision["digest"][:12], size_of(revision["size"]),
         "yes" if revision["in_store"] else "MISSING", _places(revision["nodes"]), _slots(revision["nodes"]))
        for revision in answer["revisions"]
    ]  # fmt: skip
    columns = ("REVISION", "DIGEST", "SIZE", "STORE", "NODES", "ENGINE SLOTS")
    tell_table(columns, rows, empty=f"{policy} has no revision yet.")


@app.command("history")
def history(context: typer.Context, policy: Policy, as_json: AsJson = False) -> None:
    """Show everything that happened to a policy, from the journal."""
    answer = session(context).client().call_pages(policy_path(policy, "history"), "events")
    # the gateway begins with the newest, and a story is told from its beginning
    answer["events"].reverse()
    if as_json:
        tell_json(answer)
        return
    rows = [
        (event["seq"], time_of(event["at_ms"]), event["actor"] or "-", what_happened(event["body"]))
        for event in answer["events"]
    ]
    tell_table(("SEQ", "WHEN", "BY", "WHAT"), rows, empty="Nothing happened yet.")


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


def _labels(labels: dict[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in labels.items())


def _unfit(run: dict[str, Any]) -> str:
    return f", not for {', '.join(f'@{number}' for number in run['unfit'])}" if run["unfit"] else ""


def _record(record: dict[str, Any]) -> str:
    revision = f", revision {record['revision']}" if record["revision"] else ""
    return f"{record['uri']} (step {record['step']}{revision})"


def _used(channel: str, arms: list[dict[str, Any]]) -> str:
    """``stable=@3``, ``canary=@3:90,@4:10``."""
    if len(arms) == 1:
        return f"{channel}=@{arms[0]['revision']}"
    return f"{channel}=" + (",".join(f"@{arm['revision']}:{arm['weight']}" for arm in arms) or "-")
