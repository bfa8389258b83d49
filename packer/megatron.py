"""Shards of a Megatron trainer: each rank's part of an adapter, merged by plan into one revision file.

A folder holds ``adapter_config.json`` as PEFT writes it, ``megatron.json`` with the sizes of the groups, and a file
``adapter-tp{t}-ep{e}-pp{p}.safetensors`` for every rank of tensor, expert and pipeline parallelism. Tensors bear PEFT's
names, layers and experts numbered as in the whole model, and are the rank's part of the whole tensor:

- a column-parallel module (q, k, v, gate, up, q_b, kv_b, eh) has all of A on every tensor rank, and its rows of B:
  even slices, in the order of the ranks;
- a row-parallel one (o, down) has its columns of A, and all of B;
- q_a and kv_a, which Megatron splits only where Transformer Engine is absent, are column-parallel if ``megatron.json``
  lists them in ``column_parallel``;
- every other one (router, indexer) is whole on every tensor rank;
- an expert is in the files of its expert rank, split over the tensor ranks in the same way, or whole where
  ``expert_tensor`` is 1.

Copies, of which any number may be there, must agree in every byte. With whole experts, Megatron's expert ranks run
through its tensor ranks, so that some pairs of ranks don't exist: files of those may be absent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from catalog.names import shown
from packer import adapter_config
from packer.accounting import Account, Adapter, account
from packer.adapter_config import AdapterConfig
from packer.copying import DTYPES, Progress, Sink
from packer.folder import confined, map_file, read_bounded
from packer.layouts import PER_EXPERT, layout_of
from packer.modules import PEFT_PREFIX
from packer.plan import Bytes, CopyPlan, Runs
from packer.revision import write_revision
from packer.safetensors_header import ITEM_BYTES, Header, Tensors, TensorSpec, parse_header
from packer.shape import BaseShape
from wire.events import ArtifactFacts
from wire.outcomes import InvalidRequest, Unfit

NAME = "megatron.json"
FORMAT = "megatron-lora-shards"
_MAX_SIZE = 1024
_MAX_FILES = 4096
_COLUMN_PARALLEL = frozenset({
    "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj", "eh_proj", "w1", "w3",
})  # fmt: skip
_SOMETIMES_COLUMN_PARALLEL = frozenset({"q_a_proj", "kv_a_proj_with_mqa"})
_ROW_PARALLEL = frozenset({"o_proj", "down_proj", "w2"})


class Groups(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``megatron.json``: how many ranks there are of each kind of parallelism.

    ``column_parallel`` names the modules that this trainer split by rows, beside those that all do.
    """

    format: str
    version: int
    tensor: int
    expert: int
    pipeline: int
    expert_tensor: int
    column_parallel: tuple[str, ...] = ()

    @classmethod
    def parse(cls, raw: bytes) -> Groups:
        """Raises InvalidRequest."""
        try:
            groups = msgspec.json.decode(raw, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{NAME} is malformed: {shown(str(error))}", field=NAME) from None
        if (groups.format, groups.version) != (FORMAT, 1):
            raise InvalidRequest(f"{NAME} has the format {shown(groups.format)} {groups.version}", field=NAME)
        sizes = (groups.tensor, groups.expert, groups.pipeline)
        if not all(1 <= size <= _MAX_SIZE for size in sizes) or math.prod(sizes) > _MAX_FILES:
            raise InvalidRequest(f"{NAME}: there can't be {' x '.join(map(str, sizes))} shards", field=NAME)
        if groups.expert_tensor not in (1, groups.tensor):
            raise InvalidRequest(f"{NAME}: expert_tensor must be 1 or what tensor is", field="expert_tensor")
        unknown = next((name for name in groups.column_parallel if name not in _SOMETIMES_COLUMN_PARALLEL), None)
        if unknown is not None:
            raise InvalidRequest(
                f"{NAME}: column_parallel holds {shown(unknown)}; it may hold "
                f"{', '.join(sorted(_SOMETIMES_COLUMN_PARALLEL))}",
                field="column_parallel",
            )
        return groups

    def words(self) -> str:
        """For a person: what the adapter was split over."""
        experts = "whole" if self.expert_tensor < self.tensor else "split alike"
        return f"tensor {self.tensor} (experts {experts}), expert {self.expert}, pipeline {self.pipeline}"

    def occurs(self, tensor: int, expert: int) -> bool:
        """Whether a process with these two ranks exists: they both count through the processes of a stage."""
        return self.expert_tensor == self.tensor or (tensor - expert) % math.gcd(self.tensor, self.expert) == 0

    def axis(self, name: str) -> int | None:
        """Along which axis tensor parallelism splits this tensor; None if it doesn't."""
        if ".experts." in name and self.expert_tensor == 1:
            return None
        stem, _, factor = name.rpartition(".lora_")
        module = stem.rpartition(".")[2]
        if factor == "B.weight" and (module in _COLUMN_PARALLEL or module in self.column_parallel):
            return 0
        return 1 if factor == "A.weight" and module in _ROW_PARALLEL else None


class _Shard(NamedTuple):
    what: str
    rank: tuple[int, int, int]
    header: Header
    data: Bytes


class _Part(NamedTuple):
    """One shard's part of a tensor: where its bytes are."""

    shard: int
    tensor_rank: int
    spec: TensorSpec
    offset: int


class _Whole(NamedTuple):
    """A tensor of the merged adapter: its parts in order, split along ``axis``, or one part."""

    shape: tuple[int, ...]
    parts: list[_Part]
    axis: int


def is_sharded(folder: Path) -> bool:
    """Whether ``folder`` holds shards rather than one file."""
    return (folder / NAME).is_file()


class ShardedAdapter(NamedTuple):
    """Shards, opened and fitted together: what they say of themselves, and whole tensors by name."""

    groups: Groups
    adapter: Adapter
    wholes: dict[str, _Whole]
    shards: list[_Shard]

    @property
    def size(self) -> int:
        """Bytes of all the files."""
        return sum(shard.data.nbytes for shard in self.shards)


def open_shards(folder: Path) -> ShardedAdapter:
    """Read all headers of a folder of shards. Raises InvalidRequest or Unfit that name the tensor or the field."""
    groups = Groups.parse(read_bounded(confined(folder, NAME), 1 << 16))
    raw = read_bounded(confined(folder, adapter_config.NAME), adapter_config.MAX_CONFIG_BYTES)
    config = AdapterConfig.parse(raw)
    shards = list(_shards(folder, groups))
    dtype = _dtype(shards)
    wholes = {name: _whole(name, parts, groups, shards) for name, parts in _parts(shards).items()}
    if not wholes:
        raise InvalidRequest("the shards hold no tensors", field=NAME)
    if layout_of(wholes) != PER_EXPERT:
        raise Unfit("the shards hold stacked experts: each expert's tensors are read, by its number", field=NAME)
    specs = {name: TensorSpec(dtype, whole.shape, (0, 0)) for name, whole in wholes.items()}
    adapter = Adapter(config, Tensors.of(specs), {}, PEFT_PREFIX, dtype, "the shards")
    return ShardedAdapter(groups, adapter, wholes, shards)


def pack_megatron(folder: Path, shape: BaseShape, out: Sink, *, progress: Progress | None = None) -> ArtifactFacts:
    """Write the revision file of the shards in ``folder``, as ``pack_peft`` does. Raises InvalidRequest or Unfit."""
    return pack_shards(open_shards(folder), shape, out, progress=progress)


def pack_shards(
    source: ShardedAdapter, shape: BaseShape, out: Sink, *, progress: Progress | None = None
) -> ArtifactFacts:
    """``pack_megatron`` for a folder that ``open_shards`` has read."""
    accounted = account(source.adapter, shape)
    dtype = source.adapter.dtype
    plan = CopyPlan([_runs(accounted, source.wholes, source.shards, ITEM_BYTES[dtype])])
    return write_revision(accounted.content, plan, dtype, out, progress)


def _shards(folder: Path, groups: Groups) -> Iterator[_Shard]:
    for pipeline in range(groups.pipeline):
        for expert in range(groups.expert):
            for tensor in range(groups.tensor):
                what = f"adapter-tp{tensor}-ep{expert}-pp{pipeline}.safetensors"
                if not groups.occurs(tensor, expert) and not (folder / what).exists():
                    continue
                file = map_file(confined(folder, what))
                yield _Shard(what, (tensor, expert, pipeline), parse_header(file, what), np.frombuffer(file, np.uint8))


def _dtype(shards: Sequence[_Shard]) -> str:
    dtypes = {dtype for shard in shards for dtype, _ in shard.header.tensors.kinds}
    if len(dtypes) > 1 or not dtypes <= DTYPES.keys():
        raise InvalidRequest(f"the shards have the dtypes {', '.join(sorted(dtypes))}: one of "
                             f"{', '.join(DTYPES)} throughout is read", field=NAME)  # fmt: skip
    return dtypes.pop() if dtypes else ""


def _parts(shards: Sequence[_Shard]) -> dict[str, list[_Part]]:
    """Where every tensor is found, in the order of the shards."""
    parts: dict[str, list[_Part]] = {}
    for number, shard in enumerate(shards):
        start = shard.header.data_start
        for name, spec in shard.header.tensors.as_dict().items():
            part = _Part(number, shard.rank[0], spec, start + spec.data_offsets[0])
            parts.setdefault(name, []).append(part)
    return parts


def _whole(name: str, parts: list[_Part], groups: Groups, shards: Sequence[_Shard]) -> _Whole:
    """How a tensor's parts make it up. Raises InvalidRequest where they don't, or where copies differ."""
    axis, ranks = groups.axis(name), groups.tensor
    if axis is None or ranks == 1:
        _same(name, parts, shards)
        return _Whole(parts[0].spec.shape, parts[:1], 0)
    chosen: dict[int, list[_Part]] = {}
    for part in parts:
        chosen.setdefault(part.tensor_rank, []).append(part)
    if chosen.keys() != set(range(ranks)):
        lacking = next(rank for rank in range(ranks) if rank not in chosen)
        raise InvalidRequest(f"tensor {shown(name)} has no part of tensor rank {lacking}", field=shown(name))
    for copies in chosen.values():
        _same(name, copies, shards)
    ordered = [chosen[rank][0] for rank in range(ranks)]
    shapes = {part.spec.shape for part in ordered}
    first = ordered[0].spec.shape
    if len(shapes) != 1 or len(first) != 2:
        raise InvalidRequest(f"tensor {shown(name)} has parts of unlike shape: {sorted(shapes)}", field=shown(name))
    rows, columns = first
    whole = (rows * ranks, columns) if axis == 0 else (rows, columns * ranks)
    return _Whole(whole, ordered, axis)


def _same(name: str, copies: Sequence[_Part], shards: Sequence[_Shard]) -> None:
    """Raises InvalidRequest unless all copies agree in every byte."""
    first = copies[0]
    size = first.spec.data_offsets[1] - first.spec.data_offsets[0]
    reference = shards[first.shard].data[first.offset : first.offset + size]
    for copy in copies[1:]:
        data = shards[copy.shard].data[copy.offset : copy.offset + size]
        if copy.spec.shape != first.spec.shape or not np.array_equal(data, reference):
            raise InvalidRequest(
                f"tensor {shown(name)} is not the same in {shards[first.shard].what} and {shards[copy.shard].what}",
                field=shown(name),
            )


def _runs(accounted: Account, wholes: dict[str, _Whole], shards: Sequence[_Shard], item: int) -> Runs:
    """The merged tensors' bytes: part after part along the rows, row by row along the columns."""
    offsets: list[int] = []
    lengths: list[int] = []
    names: list[str] = []
    which: list[int] = []
    for name in accounted.names:
        whole = wholes[name]
        rows = whole.shape[0] if whole.axis == 1 and len(whole.parts) > 1 else 1
        for row in range(rows):
            for part in whole.parts:
                length = math.prod(part.spec.shape) * item // rows
                offsets.append(part.offset + row * length)
                lengths.append(length)
                names.append(name)
                which.append(part.shard)
    return Runs([shard.data for shard in shards], offsets, lengths, names, which)
