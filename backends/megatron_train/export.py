"""A rank's part of a revision file, written straight to its place: no rank ever holds the whole adapter.

What tensor ranks split by columns (A of o and down) is gathered, which is rank-sized; all else is a range of rows or of
experts, and goes to the file as it lies. Layers come in order, so that the file fills from its beginning.
"""

from __future__ import annotations

import errno
import os

import numpy as np
import torch
import torch.distributed as dist

from packer.safetensors_header import ITEM_BYTES
from wire.outcomes import ArtifactUnavailable, InvalidRequest, StorageFull
from wire.trainer import ExportLayers

from .finite import is_finite
from .hf_config import BaseConfig
from .layout import Slot
from .parallel import Groups
from .policy import Policy, view
from .revision import revision_layout
from .topology import Topology

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_layers(policy: Policy, base: BaseConfig, topology: Topology, groups: Groups, ask: ExportLayers) -> None:
    """Write what this rank owns of the layers. Raises InvalidRequest for a value that is not finite, StorageFull."""
    wanted = range(ask.first, ask.last)
    slots = [slot for slot in policy.layout.slots if slot.place.layer in wanted]
    # a policy's experts stand last in its buffer, and where the file has them is known by name alone
    offsets = revision_layout(policy.spec, base, ask.dtype).offsets
    item = ITEM_BYTES[ask.dtype]
    pieces: list[tuple[int, torch.Tensor]] = []
    for slot in slots:
        values = view(policy.parameters, slot)
        start = offsets[slot.name]
        if slot.axis == 1 and topology.tensor > 1:
            values = _gathered(values, topology, groups)
            mine = topology.data_rank == 0 and topology.tensor_rank == 0
        else:
            mine = slot.owned
            start += _rows_before(slot) * item
        if mine:
            pieces.append((start, values.reshape(-1)))
    _write(ask, sorted(pieces, key=lambda piece: piece[0]), groups, topology)


def _rows_before(slot: Slot) -> int:
    """Numbers of the whole tensor that lie before this rank's part, which is a range along the first axis."""
    return slot.start * (slot.size // max(slot.stop - slot.start, 1)) if slot.axis == 0 else 0


def _gathered(columns: torch.Tensor, topology: Topology, groups: Groups) -> torch.Tensor:
    parts = [torch.empty_like(columns) for _ in range(topology.tensor)]
    dist.all_gather(parts, columns.contiguous(), group=groups.tensor)
    return torch.cat(parts, dim=1)


def _write(ask: ExportLayers, pieces: list[tuple[int, torch.Tensor]], groups: Groups, topology: Topology) -> None:
    """Convert on the device, move in one transfer, write run by run."""
    finite = True
    data = np.empty(0, np.uint8)
    if pieces:
        flat = torch.cat([values for _, values in pieces]).to(_DTYPES[ask.dtype])
        finite = bool(is_finite(flat))
        data = flat.cpu().view(torch.uint8).numpy()
    _agree(finite, groups, topology)
    try:
        descriptor = os.open(ask.path, os.O_WRONLY)
        try:
            for start, begin, end in _runs(pieces, ITEM_BYTES[ask.dtype]):
                _write_all(descriptor, data.data[begin:end], start)
        finally:
            os.close(descriptor)
    except OSError as error:
        kind = StorageFull if error.errno in _FULL else ArtifactUnavailable
        raise kind(f"cannot write the revision: {error.strerror}") from error


def _agree(finite: bool, groups: Groups, topology: Topology) -> None:
    """Raises InvalidRequest on all ranks if any has a value that is no number."""
    if topology.world > 1:
        flag = torch.tensor(float(not finite), device=groups.device)
        dist.all_reduce(flag, group=groups.world)
        finite = not flag.item()
    if not finite:
        raise InvalidRequest("the policy has a value that is not finite, or not in this dtype", field="policy")


def _runs(pieces: list[tuple[int, torch.Tensor]], item: int) -> list[tuple[int, int, int]]:
    """(place in the file, begin, end in the data): neighbours in the file are one run."""
    runs: list[tuple[int, int, int]] = []
    begin = 0
    for start, values in pieces:
        size = values.numel() * item
        if runs and runs[-1][0] + runs[-1][2] - runs[-1][1] == start:
            runs[-1] = (runs[-1][0], runs[-1][1], begin + size)
        else:
            runs.append((start, begin, begin + size))
        begin += size
    return runs


def _write_all(descriptor: int, data: memoryview, place: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, place)
        data, place = data[written:], place + written
