"""From a PEFT folder to a revision file: every tensor accounted for, every byte kept."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from catalog.names import shown
from packer import adapter_config
from packer.accounting import Account, Adapter, account
from packer.adapter_config import AdapterConfig
from packer.copying import DTYPES, Progress, Sink
from packer.folder import confined, map_file, read_bounded
from packer.layouts import BLOCKWISE, STACKED
from packer.modules import PEFT_PREFIX, PEFT_PREFIXES
from packer.plan import Bytes, CopyPlan, Runs, Segment, Turned
from packer.revision import Content, Pair, write_revision
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
        first_of: dict[str, str] = {}
        tensors = self.header.tensors
        if len({dtype for dtype, _ in tensors.kinds}) == 1:
            first_of = {tensors.kinds[0][0]: ""}
        else:
            for name, spec in tensors.items():
                first_of.setdefault(spec.dtype, name)
            examples = ", ".join(f"{dtype} ({shown(name)})" for dtype, name in first_of.items())
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
    file = map_file(confined(folder, TENSORS_NAME), whole=True)
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
    accounted = account(adapter_of(source), shape)
    return write_revision(accounted.content, _plan(source, accounted), source.dtype, out, progress)


def adapter_of(source: PeftFolder) -> Adapter:
    """The folder as it is accounted for. Raises InvalidRequest for dtypes that are not read."""
    header = source.header
    return Adapter(source.config, header.tensors, header.metadata, source.prefix, source.dtype, TENSORS_NAME)


def _plan(source: PeftFolder, accounted: Account) -> CopyPlan:
    """Which bytes of the folder's file follow each other in the revision file."""
    file = np.frombuffer(source.file, dtype=np.uint8)
    spans = source.header.tensors.spans[accounted.rows] + source.header.data_start
    content, bounds = accounted.content, accounted.bounds.tolist()
    segments: list[Segment] = []
    begun = 0

    def run(end: int) -> None:
        """What came since the last segment is copied as it lies."""
        if begun < end:
            part = slice(begun, end)
            lengths = spans[part, 1] - spans[part, 0]
            segments.append(Runs([file], spans[part, 0], lengths, accounted.names[part]))

    if content.manifest.layout in (STACKED, BLOCKWISE):
        for number, pair in enumerate(content.pairs):
            if pair.place.expert:
                place = bounds[2 * number + 1]
                run(place)
                start, end = spans[place].tolist()
                segments.append(unstacked(file[start:end], pair, source.dtype, accounted.names[place], content))
                begun = place + 1
    run(len(accounted.names))
    return CopyPlan(segments)


def unstacked(stack: Bytes, pair: Pair, dtype: str, name: str, content: Content) -> Turned:
    """A stack's B, (out, columns), as (experts, out, rank)."""
    columns = stack.view(np.dtype((np.void, ITEM_BYTES[dtype])))
    experts = pair.experts[1]
    if content.manifest.layout == STACKED:
        view = columns.reshape(pair.outputs, pair.rank, experts).transpose(2, 0, 1)
    else:
        view = columns.reshape(pair.outputs, experts, pair.rank).transpose(1, 0, 2)
    return Turned(view, name)
