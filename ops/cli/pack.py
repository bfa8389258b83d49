"""``roost pack`` and ``roost unpack``: between PEFT folders and revision files, without a mesh."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from packer import inspect as inspection
from packer.folder import read_bounded
from packer.formats import pack_adapter
from packer.revision import RevisionFile
from packer.shape import MAX_CONFIG_BYTES, BaseShape
from packer.unpack import write_peft
from wire.outcomes import InvalidRequest, NotFound, RoostError, Unfit

from .inspection import show_inspection
from .output import exit_code, size_of, tell, tell_json
from .progress import byte_progress
from .session import AsJson


def register(app: typer.Typer) -> None:
    app.command("pack")(pack)
    app.command("unpack")(unpack)
    app.command("inspect")(inspect)


def pack(
    adapter: Annotated[Path, typer.Argument(help="A PEFT folder, Megatron shards, or (to inspect) a revision file.")],
    base_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="config.json of the base it was trained on.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The revision file to write.")
    ] = None,
    look: Annotated[
        bool, typer.Option("--inspect", help="Write nothing: say what the adapter is, as `roost inspect` does.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Pack an adapter into a revision file: the same bytes in serving order, exactly reversible."""
    if look:
        inspect(adapter, base_config, as_json)
        return
    shape = _shape_of(base_config)
    if shape is None or output is None:
        missing = "--base-config" if shape is None else "--output"
        raise InvalidRequest(f"packing needs {missing}", field=missing.strip("-"))
    part = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with byte_progress("Packing") as progress, part.open("wb") as out:
            facts = pack_adapter(adapter, shape, out, progress=progress)
        part.replace(output)
    except OSError as error:
        if isinstance(error, RoostError):
            raise
        raise InvalidRequest(f"--output {output}: {error.strerror}", field="output") from None
    finally:
        part.unlink(missing_ok=True)
    if as_json:
        tell_json(msgspec.to_builtins(facts))
    else:
        tell("Packed ", (str(output), "bold"), f"  {size_of(facts.size)}, rank {facts.rank}, {facts.tensors} tensors")
        tell(f"digest {facts.digest}")


def unpack(
    file: Annotated[Path, typer.Argument(help="A revision file.")],
    folder: Annotated[Path, typer.Argument(help="The PEFT folder to write; must not exist.")],
    base_model: Annotated[str, typer.Option(help="base_model_name_or_path to write into its configuration.")] = "",
) -> None:
    """Unpack a revision file into a PEFT folder, tensors bit for bit."""
    with byte_progress("Unpacking") as progress:
        write_peft(RevisionFile.open(file).buffer, folder, base_model=base_model, progress=progress)
    tell("Unpacked into ", (str(folder), "bold"))


def inspect(
    path: Annotated[Path, typer.Argument(help="A PEFT folder, Megatron shards or a revision file.")],
    base_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="config.json of a base: does the adapter fit it?")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what an adapter is, and whether it would be taken. Exits with 6 where it would not."""
    if not path.exists():
        raise NotFound(f"there is no {path}", field="path")
    found = inspection.inspect(path, _shape_of(base_config))
    show_inspection(path.name, found, as_json=as_json)
    if found.refusal:
        raise typer.Exit(exit_code(Unfit(found.refusal)))


def _shape_of(base_config: Path | None) -> BaseShape | None:
    return BaseShape.from_config(read_bounded(base_config, MAX_CONFIG_BYTES)) if base_config else None


def decode_config(text: str) -> bytes:
    """A config.json as the gateway hands it out."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise InvalidRequest("the gateway's copy of the base's config.json is not base64", field="config") from None
