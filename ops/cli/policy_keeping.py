"""``roost policy``: which revisions are kept, and what a policy keeps hold of outside the catalog."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from catalog.inputs import MAX_DAYS
from wire.events import RecordKind

from .client import policy_path
from .events import retention as shown_retention
from .output import tell_json, tell_table, time_of
from .policy_arguments import Expected, Policy, ask_change, tell_change
from .session import AsJson, session

Revision = Annotated[int, typer.Argument(min=1)]
Kind = Annotated[RecordKind, typer.Argument(help="What it is.")]
Uri = Annotated[str, typer.Argument(help="Where its bytes are.")]


def register(app: typer.Typer) -> None:
    for command in (retention, prune, retain, release, training):
        app.command(command.__name__)(command)
    app.command("retire-revision")(retire_revision)
    app.command("restore-revision")(restore_revision)


def retention(
    context: typer.Context,
    policy: Policy,
    keep_last: Annotated[
        int | None, typer.Option(min=1, help="Keep so many of the newest.  [default: keep all]")
    ] = None,
    keep_days: Annotated[float, typer.Option(min=0, help="Keep what is younger than so many days.")] = 0.0,
    expect: Expected = None,
    as_json: AsJson = False,
) -> None:
    """Say which revisions are kept; the others are retired in the background.

    What a channel points to, a training record names or a node holds is kept in any case.
    """
    # not a number compares as neither, and is refused
    if not 0 <= keep_days <= MAX_DAYS:
        raise typer.BadParameter(f"--keep-days is {keep_days:g}: expected 0 to {MAX_DAYS} days")
    if keep_last is None and keep_days:
        raise typer.BadParameter("--keep-days needs --keep-last")
    kept = None if keep_last is None else {"keep_last": keep_last, "keep_days": keep_days}
    answer = ask_change(context, "PUT", policy, ("retention",), {"retention": kept}, expect)
    tell_change(answer, as_json, (policy, "bold"), f" keeps {shown_retention(kept)}")


def prune(context: typer.Context, policy: Policy, expect: Expected = None, as_json: AsJson = False) -> None:
    """Retire now the revisions that the policy's retention does not keep."""
    answer = ask_change(context, "POST", policy, ("prune",), {}, expect)
    tell_change(answer, as_json, f"Retired {answer['count']} revisions of ", (policy, "bold"))


def retire_revision(
    context: typer.Context, policy: Policy, revision: Revision, expect: Expected = None, as_json: AsJson = False
) -> None:
    """Retire one revision: it can't be named any more."""
    answer = ask_change(context, "POST", policy, ("revisions", str(revision), "retire"), {}, expect)
    tell_change(
        answer, as_json, "Retired " if answer["changed"] else "Was retired already: ", (f"{policy}@{revision}", "bold")
    )


def restore_revision(
    context: typer.Context, policy: Policy, revision: Revision, expect: Expected = None, as_json: AsJson = False
) -> None:
    """Let a retired revision be named again, as long as the store has its bytes."""
    answer = ask_change(context, "POST", policy, ("revisions", str(revision), "restore"), {}, expect)
    tell_change(
        answer, as_json, "Restored " if answer["changed"] else "Was not retired: ", (f"{policy}@{revision}", "bold")
    )


def retain(
    context: typer.Context,
    policy: Policy,
    kind: Kind,
    uri: Uri,
    digest: Annotated[str, typer.Option(help="The digest of its bytes.")] = "",
    step: Annotated[int, typer.Option(min=0, help="The step of the training run.")] = 0,
    revision: Annotated[int, typer.Option(min=0, help="The revision that came of it, or made it.")] = 0,
    expect: Expected = None,
    as_json: AsJson = False,
) -> None:
    """Keep hold of a training checkpoint or a rollout, and of the revision that goes with it."""
    body = {"kind": kind.value, "uri": uri, "digest": digest, "step": step, "revision": revision}
    answer = ask_change(context, "POST", policy, ("training",), body, expect)
    tell_change(answer, as_json, (policy, "bold"), f" keeps {kind} {uri}")


def release(
    context: typer.Context, policy: Policy, kind: Kind, uri: Uri, expect: Expected = None, as_json: AsJson = False
) -> None:
    """Release a training checkpoint or a rollout."""
    answer = ask_change(context, "DELETE", policy, ("training", kind.value), {"uri": uri}, expect)
    tell_change(answer, as_json, (policy, "bold"), f" keeps {kind} {uri} no more")


def training(context: typer.Context, policy: Policy, as_json: AsJson = False) -> None:
    """List the training checkpoints and rollouts that a policy keeps hold of."""
    answer = session(context).client().call("GET", policy_path(policy, "training"))
    if as_json:
        tell_json(answer)
        return
    columns = ("KIND", "STEP", "REVISION", "WHERE", "SINCE", "BY")
    tell_table(columns, [_row(record) for record in answer["records"]], empty=f"{policy} keeps hold of nothing.")


def _row(record: dict[str, Any]) -> tuple[object, ...]:
    revision = f"@{record['revision']}" if record["revision"] else "-"
    since = time_of(record["retained_ms"])
    return record["kind"], record["step"], revision, record["uri"], since, record["actor"] or "-"
