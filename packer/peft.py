"""From a PEFT folder to a revision file: every tensor accounted for, every byte kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np

from catalog.names import shown
from packer import accounting, adapter_config
from packer.accounting import Account, Adapter
from packer.adapter_config import AdapterConfig
from packer.copying import DTYPES, Progress, Sink
from packer.folder import confined, map_file, read_bounded
from packer.layouts import BLOCKWISE, STACKED
from packer.modules import PEFT_PREFIX, PEFT_PREFIXES, Place
from packer.plan import Bytes, CopyPlan, Runs, Segment, Turned
from packer.revision import Pair, write_revision
from packer.safetensors_header import ITEM_BYTES, Header, parse_header
from packer.shape import BaseShape
from wire.events import ArtifactFacts
from wire.outcomes import InvalidRequest

TENSORS_NAME = "adapter_model.safetensors"
_PICKLED = ("adapter_model.bin", "adapter_model.pt")


class PeftFolder(msgspec.Struct, frozen=True):
    """A PEFT folder, opened: its configuration, its tensors' header, and the whole file's mapped bytes."""

    config: AdapterConfig
    header: Header
    file: memoryview

    @property
    def prefix(self) -> str:
        """What the names of the tensors begin with: the longest known prefix that the first one has."""
        first = next(iter(self.header.tensors))
        return next((prefix for prefix in PEFT_PREFIXES if first.startswith(f"{prefix}layers.")), PEFT_PREFIX)

    @property
    def dtype(self) -> str:
        """The one dtype of all tensors. Raises InvalidRequest where they have several, or one that is not read."""
        first_of = dict.fromkeys(spec.dtype for spec in self.header.tensors.values())
        if len(first_of) > 1:
            for name, spec in self.header.tensors.items():
                first_of[spec.dtype] = first_of[spec.dtype] or name
            examples = ", ".join(f"{dtype} ({shown(name or '')})" for dtype, name in first_of.items())
            raise InvalidRequest(f"{TENSORS_NAME} mixes dtypes: {examples}", field=TENSORS_NAME)
        (dtype,) = first_of
        if dtype not in DTYPES:
            raise InvalidRequest(
                f"{TENSORS_NAME} has the dtype {dtype}; read are {', '.join(DTYPES)}", field=TENSORS_NAME
            )
        return dtype


def open_peft(folder: Path) -> PeftFolder:
    """Read a folder's configuration and header. Raises InvalidRequest or Unfit that name the field and the reason."""
    if not folder.is_dir():
        raise InvalidRequest(f"{folder} is not a folder", field="folder")
    config = AdapterConfig.parse(read_bounded(confined(folder, adapter_config.NAME), adapter_config.MAX_CONFIG_BYTES))
    if not (folder / TENSORS_NAME).exists():
        for name in _PICKLED:
            if (folder / name).exists():
                raise InvalidRequest(
                    f"{folder} holds {name}, a pickle that could run code: save the adapter as safetensors", field=name
                )
    file = map_file(confined(folder, TENSORS_NAME))
    header = parse_header(file, TENSORS_NAME)
    if not header.tensors:
        raise InvalidRequest(f"{TENSORS_NAME} holds no tensors", field=TENSORS_NAME)
    return PeftFolder(config, header, file)


def pack_peft(folder: Path, shape: BaseShape, out: Sink, *, progress: Progress | None = None) -> ArtifactFacts:
    """Write the revision file of the PEFT adapter in ``folder``, trained on a base of ``shape``, to ``out``.

    Memory is bounded by a few blocks beside the mapped input. Raises InvalidRequest or Unfit that name the tensor or
    the field: what was written until then is worth nothing.
    """
    return pack_opened(open_peft(folder), shape, out, progress=progress)


def pack_opened(source: PeftFolder, shape: BaseShape, out: Sink, *, progress: Progress | None = None) -> ArtifactFacts:
    """``pack_peft`` for a folder that ``open_peft`` has read."""
    accounted = account(source, shape)
    return write_revision(accounted.content, _plan(source, accounted), source.dtype, out, progress)


def peft_name(place: Place, path: str, factor: str, prefix: str) -> str:
    """What PEFT calls a factor of the module at ``path`` inside its layer."""
    return f"{prefix}layers.{place.layer}.{path}.lora_{factor}.weight"


def account(source: PeftFolder, shape: BaseShape) -> Account:
    """What the folder holds, once every tensor that its configuration asks for is there, and no other.

    Raises InvalidRequest or Unfit that name the tensor or the field.
    """
    header = source.header
    adapter = Adapter(source.config, header.tensors, header.metadata, source.prefix, source.dtype, TENSORS_NAME)
    return accounting.account(adapter, shape)


def _plan(source: PeftFolder, accounted: Account) -> CopyPlan:
    """Which bytes of the folder's file follow each other in the revision file."""
    file = np.frombuffer(source.file, dtype=np.uint8)
    layout = accounted.content.manifest.layout
    segments: list[Segment] = []
    names: list[str] = []

    def flush() -> None:
        if names:
            segments.append(runs(file, source.header, names))
            names.clear()

    for pair, unit in zip(accounted.content.pairs, accounted.units, strict=True):
        names += unit.names("A")
        if pair.place.expert and layout in (STACKED, BLOCKWISE):
            flush()
            segments.append(_unstacked(source, file, pair, unit.names("B")[0], layout))
        else:
            names += unit.names("B")
    flush()
    return CopyPlan(segments)


def _unstacked(source: PeftFolder, file: Bytes, pair: Pair, name: str, layout: str) -> Segment:
    """A stack's B, (out, columns), as (experts, out, rank)."""
    start, end = (source.header.data_start + offset for offset in source.header.tensors[name].data_offsets)
    columns = file[start:end].view(np.dtype((np.void, ITEM_BYTES[source.dtype])))
    experts = pair.experts[1]
    if layout == STACKED:
        view = columns.reshape(pair.outputs, pair.rank, experts).transpose(2, 0, 1)
    else:
        view = columns.reshape(pair.outputs, experts, pair.rank).transpose(1, 0, 2)
    return Turned(view, name)


def runs(file: Bytes, header: Header, names: Sequence[str]) -> Runs:
    """The named tensors of a safetensors file, in that order."""
    ordered = list(names)
    spans = np.fromiter(
        chain.from_iterable(header.tensors[name].data_offsets for name in ordered), np.int64, 2 * len(ordered)
    ).reshape(-1, 2)
    return Runs([file], header.data_start + spans[:, 0], spans[:, 1] - spans[:, 0], ordered)
