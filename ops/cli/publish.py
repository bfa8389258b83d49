"""``roost publish``: a PEFT adapter becomes a revision of a policy."""

from __future__ import annotations

import getpass
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from catalog.names import check_policy
from packer.formats import pack_adapter
from packer.shape import BaseShape
from wire.events import ArtifactFacts
from wire.outcomes import ArtifactUnavailable, NotFound, RoostError, error_for

from ..sources.source import opened
from .client import ApiClient, policy_path
from .output import Unreachable, size_of, tell, tell_json
from .pack import decode_config
from .progress import byte_progress
from .session import AsJson, session

# between two uploads, whatever the gateway asks for
MAX_WAIT_S = 10.0


def register(app: typer.Typer) -> None:
    app.command("publish")(publish)
    app.command("collect")(collect)


def publish(
    context: typer.Context,
    policy: Annotated[str, typer.Argument(metavar="TENANT/NAME")],
    source: Annotated[
        str,
        typer.Argument(
            help="A PEFT adapter: a folder, an URL of one (s3://, gs://, az://, https://), or hf:ORG/NAME[@REVISION]."
        ),
    ],
    create_over: Annotated[
        str, typer.Option(metavar="BASE", help="Create the policy over this base if it is new.")
    ] = "",
    expect: Annotated[int | None, typer.Option(metavar="VERSION", help="Only if the policy has this version.")] = None,
    note: Annotated[str, typer.Option(help="Kept with the revision's history.")] = "",
    wait: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Return once this gateway's host has it too; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Pack a PEFT adapter, upload it, and name it as the policy's next revision.

    Fetched are adapter_config.json and adapter_model.safetensors alone, with credentials from the environment. Until
    the last step nothing of it can be named, so an interrupted publish is simply repeated.
    """
    check_policy(policy)
    client = session(context).client()
    # the admin key of this host's mesh is for this host
    others = [ApiClient(url, session(context).key) for url in wait or ()]
    shape = BaseShape.from_config(_base_config(client, policy, create_over))
    with opened(source, byte_progress) as adapter, tempfile.TemporaryDirectory(prefix="roost-publish-") as scratch:
        file = Path(scratch) / "revision.safetensors"
        with byte_progress("Packing") as progress, file.open("wb") as out:
            facts = pack_adapter(adapter.folder, shape, out, progress=progress)
        _upload(client, file, facts.digest)
    body = {
        "digest": facts.digest,
        "create_over": create_over,
        "expected_version": expect,
        "provenance": {"source": f"{getpass.getuser()}: {adapter.origin}", "format": "peft", "note": note},
    }
    answer = client.call("POST", policy_path(policy, "revisions"), body)
    # before anything is waited for: the revision is there, whether or not the other hosts come to have it
    if as_json:
        tell_json(answer)
    else:
        _tell_published(policy, answer, facts)
    for other in others:
        _await(other, answer["seq"], f"{policy}@{answer['revision']}")


def _await(other: ApiClient, seq: int, published: str) -> None:
    """Raises what kept it from waiting, behind what is done for all that."""
    try:
        other.call("GET", f"/roost/v1/catalog/position?reached={seq}")
    except RoostError as error:
        message = f"published as {published}; could not wait for {other.url}: {error.message}"
        if isinstance(error, Unreachable):
            raise Unreachable(message) from None
        raise error_for(error.outcome, message, field=error.field, retry_after_s=error.retry_after_s) from None


def _tell_published(policy: str, answer: dict[str, Any], facts: ArtifactFacts) -> None:
    done = "Published" if answer["changed"] else "Is the latest already:"
    tell(
        f"{done} ", (f"{policy}@{answer['revision']}", "bold"),
        f"  rank {facts.rank}, {facts.tensors} tensors, {size_of(facts.size)}, digest {facts.digest[:12]}",
    )  # fmt: skip
    for warning in answer.get("warnings", ()):
        tell(("Note: ", "yellow"), warning)


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
    """Upload, and again where the store behind the gateway asks for a moment: what is stored twice is stored once."""
    for last in (False, False, True):
        try:
            _upload_once(client, file, digest)
            return
        except ArtifactUnavailable as error:
            if last or error.retry_after_s is None:
                raise
            time.sleep(min(error.retry_after_s, MAX_WAIT_S))


def _upload_once(client: ApiClient, file: Path, digest: str) -> None:
    size = file.stat().st_size
    done = 0
    with byte_progress("Uploading") as progress:

        def sent(count: int) -> None:
            nonlocal done
            done += count
            progress(done, size)

        client.upload(f"/roost/v1/artifacts/{digest}", file, sent)
