"""``roost publish``: a PEFT folder becomes a revision of a policy."""

from __future__ import annotations

import getpass
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from catalog.names import check_policy
from packer.formats import pack_adapter
from packer.shape import BaseShape
from wire.outcomes import NotFound

from .client import ApiClient, policy_path
from .output import size_of, tell, tell_json
from .pack import decode_config
from .progress import byte_progress
from .session import AsJson, session


def register(app: typer.Typer) -> None:
    app.command("publish")(publish)
    app.command("collect")(collect)


def publish(
    context: typer.Context,
    policy: Annotated[str, typer.Argument(metavar="TENANT/NAME")],
    folder: Annotated[Path, typer.Argument(help="A PEFT folder, or Megatron shards.")],
    create_over: Annotated[
        str, typer.Option(metavar="BASE", help="Create the policy over this base if it is new.")
    ] = "",
    expect: Annotated[int | None, typer.Option(metavar="VERSION", help="Only if the policy has this version.")] = None,
    note: Annotated[str, typer.Option(help="Kept with the revision's history.")] = "",
    as_json: AsJson = False,
) -> None:
    """Pack a PEFT adapter, upload it, and name it as the policy's next revision.

    Until the last step nothing of it can be named, so an interrupted publish is simply repeated.
    """
    check_policy(policy)
    client = session(context).client()
    shape = BaseShape.from_config(_base_config(client, policy, create_over))
    with tempfile.TemporaryDirectory(prefix="roost-publish-") as scratch:
        file = Path(scratch) / "revision.safetensors"
        with byte_progress("Packing") as progress, file.open("wb") as out:
            facts = pack_adapter(folder, shape, out, progress=progress)
        _upload(client, file, facts.digest)
    body = {
        "digest": facts.digest,
        "create_over": create_over,
        "expected_version": expect,
        "provenance": {"source": f"{getpass.getuser()}: {folder.absolute().name}", "format": "peft", "note": note},
    }
    answer = client.call("POST", policy_path(policy, "revisions"), body)
    if as_json:
        tell_json(answer)
        return
    done = "Published" if answer["changed"] else "Is the latest already:"
    tell(
        f"{done} ", (f"{policy}@{answer['revision']}", "bold"),
        f"  rank {facts.rank}, {facts.tensors} tensors, {size_of(facts.size)}, digest {facts.digest[:12]}",
    )  # fmt: skip


def collect(
    context: typer.Context,
    older_than: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Younger files may be in the making.")
    ] = 3600,
    as_json: AsJson = False,
) -> None:
    """Remove from the store what interrupted publishes left: files that no revision names."""
    answer = session(context).client().call("POST", "/roost/v1/orphans/collect", {"older_than_s": older_than})
    if as_json:
        tell_json(answer)
    else:
        tell(f"Removed {answer['removed']} file(s), {size_of(answer['bytes'])}.")


def _base_config(client: ApiClient, policy: str, create_over: str) -> bytes:
    """config.json of the base that the policy has or is to have."""
    try:
        base = client.call("GET", policy_path(policy))["base"]
    except NotFound as error:
        if not create_over:
            raise NotFound(
                f"{error.message}: name its base with --create-over BASE (see `roost base list`), or create it first",
                field="policy",
            ) from None
        base = create_over
    found: dict[str, Any] = client.call("GET", f"/roost/v1/bases/{base}")
    return decode_config(found["config"])


def _upload(client: ApiClient, file: Path, digest: str) -> None:
    size = file.stat().st_size
    done = 0
    with byte_progress("Uploading") as progress:

        def sent(count: int) -> None:
            nonlocal done
            done += count
            progress(done, size)

        client.upload(f"/roost/v1/artifacts/{digest}", file, sent)
