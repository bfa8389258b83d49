"""``roost pack`` and ``roost unpack``: between PEFT folders and revision files, without a mesh."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from packer.folder import read_bounded
from packer.inspect import Inspection
from packer.inspect import inspect as look_at
from packer.peft import pack_peft
from packer.revision import RevisionFile
from packer.shape import MAX_CONFIG_BYTES, BaseShape
from packer.unpack import write_peft
from wire.outcomes import InvalidRequest, NotFound, RoostError, Unfit

from .output import OUT, exit_code, make_table, size_of, tell, tell_json
from .progress import byte_progress
from .session import AsJson


def register(app: typer.Typer) -> None:
    app.command("pack")(pack)
    app.command("unpack")(unpack)
    app.command("inspect")(inspect)


def pack(
    folder: Annotated[Path, typer.Argument(help="A PEFT folder.")],
    base_config: Annotated[Path, typer.Option(metavar="FILE", help="config.json of the base it was trained on.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The revision file to write.")],
    as_json: AsJson = False,
) -> None:
    """Pack a PEFT adapter into a revision file: the same bytes in serving order, exactly reversible."""
    shape = BaseShape.from_config(read_bounded(base_config, MAX_CONFIG_BYTES))
    part = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with byte_progress("Packing") as progress, part.open("wb") as out:
            facts = pack_peft(folder, shape, out, progress=progress)
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
    path: Annotated[Path, typer.Argument(help="A PEFT folder or a revision file.")],
    base_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="config.json of a base: does the adapter fit it?")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what an adapter is, and whether it would be taken. Exits with 6 where it would not."""
    if not path.exists():
        raise NotFound(f"there is no {path}", field="path")
    shape = BaseShape.from_config(read_bounded(base_config, MAX_CONFIG_BYTES)) if base_config else None
    found = look_at(path, shape)
    if as_json:
        tell_json(msgspec.to_builtins(found))
    else:
        _tell_inspection(path, found)
    if found.refusal:
        raise typer.Exit(exit_code(Unfit(found.refusal)))


def _tell_inspection(path: Path, found: Inspection) -> None:
    scaling = "rsLoRA" if found.rslora else "LoRA"
    dtypes = ", ".join(found.dtypes) or "no tensors"
    tell((path.name, "bold"), f"  {found.kind}, {size_of(found.bytes)}, {found.tensors} tensors, {dtypes}, {scaling}")
    if found.trained_on:
        tell(f"trained on {found.trained_on}")
    if found.modules:
        rows = [
            (one.module, one.layers, f"{one.inputs} x {one.outputs}", one.rank, f"{one.alpha:g}", f"{one.scale:g}")
            for one in found.modules
        ]
        OUT.print(make_table(("MODULE", "LAYERS", "IN x OUT", "RANK", "ALPHA", "SCALE"), rows))
    against = f"for {found.compared}" if found.compared else "by itself: give --base-config to compare with a base"
    if found.refusal:
        tell(("would be refused ", "bold red"), f"{against}: {found.refusal}")
    elif found.facts is not None:
        tell(("fit ", "green"), f"{against}; {found.facts.parameters:,} parameters")
        tell(f"digest {found.facts.digest}")


def decode_config(text: str) -> bytes:
    """A config.json as the gateway hands it out."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise InvalidRequest("the gateway's copy of the base's config.json is not base64", field="config") from None
