"""A policy's checkpoint: a folder with a file of each rank that has something of its own, and a manifest.

Each file holds parts of whole tensors and says which, so that a checkpoint can be read by ranks of any topology: a rank
takes from all files what overlaps its own part. The manifest is the control's (``manifest.py``), written last.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from catalog.names import shown
from packer.folder import confined
from wire.outcomes import ArtifactUnavailable, InvalidRequest, StorageFull

from .layout import Slot
from .manifest import StateManifest, read_manifest
from .policy import FIRST_MOMENTS, GRADIENTS, KINDS, PARAMETERS, SECOND_MOMENTS, Policy, view

_PARTS = "parts"


class Part(msgspec.Struct, array_like=True, frozen=True):
    """Which part of a whole tensor lies in a file: ``start`` to ``stop`` along ``axis``, all of it if that is -1."""

    shape: tuple[int, ...]
    axis: int
    start: int
    stop: int


def write_part(policy: Policy, folder: Path, rank: int, *, optimizer: bool, gradients: bool) -> tuple[str, str]:
    """Write and fsync this rank's file. Returns its name and digest. Raises StorageFull, ArtifactUnavailable."""
    kinds = [PARAMETERS]
    kinds += [FIRST_MOMENTS, SECOND_MOMENTS] if optimizer else []
    kinds += [GRADIENTS] if gradients else []
    tensors: dict[str, torch.Tensor] = {}
    parts: dict[str, Part] = {}
    for slot in policy.layout.slots:
        if slot.owned:
            parts[slot.name] = Part(slot.shape, -1 if slot.axis is None else slot.axis, slot.start, slot.stop)
            for kind in kinds:
                tensors[f"{KINDS[kind]}/{slot.name}"] = view(policy.buffer[kind], slot).contiguous().cpu()
    name = f"rank-{rank}.safetensors"
    path = folder / name
    try:
        save_file(tensors, path, metadata={_PARTS: msgspec.json.encode(parts).decode()})
        with path.open("rb") as file:
            os.fsync(file.fileno())
            digest = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    except (OSError, SafetensorError) as error:
        full = isinstance(error, OSError) and error.errno == 28
        kind_of = StorageFull if full else ArtifactUnavailable
        raise kind_of(f"cannot write {name} of a checkpoint: {error}") from error
    return name, digest


def read_part(policy: Policy, folder: Path, *, optimizer: bool) -> None:
    """Take this rank's part of a checkpoint; with ``optimizer`` moments, step and gradients, as far as it has them.

    Raises InvalidRequest or Unfit: the policy is as it was.
    """
    manifest = read_manifest(folder)
    manifest.check_for(policy.spec, optimizer=optimizer)
    fresh = torch.zeros_like(policy.buffer, device="cpu")
    kinds = [PARAMETERS, *((FIRST_MOMENTS, SECOND_MOMENTS) if optimizer else ())]
    kinds += [GRADIENTS] if optimizer and manifest.gradients else []
    _fill(fresh, policy, folder, manifest, kinds)
    if not optimizer:
        # weights alone: what the optimiser knows of others is worth nothing for them
        fresh[FIRST_MOMENTS:] = 0
    policy.buffer.copy_(fresh)
    policy.step = manifest.step if optimizer else 0
    policy.accumulated = GRADIENTS in kinds


def _fill(fresh: torch.Tensor, policy: Policy, folder: Path, manifest: StateManifest, kinds: list[int]) -> None:
    filled = dict.fromkeys(policy.layout.slots, 0)
    for name in manifest.files:
        path = confined(folder, name)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                parts = _parts(file.metadata() or {}, name)
                for slot in policy.layout.slots:
                    part = parts.get(slot.name)
                    if part is not None:
                        filled[slot] += _copy(file, fresh, slot, part, kinds)
        except (OSError, SafetensorError) as error:
            raise ArtifactUnavailable(f"cannot read {name} of the checkpoint: {error}") from error
    for slot, count in filled.items():
        if count != slot.size:
            raise InvalidRequest(f"the checkpoint holds {count} of {slot.size} numbers of {slot.name}", field=slot.name)


def _parts(metadata: dict[str, str], name: str) -> dict[str, Part]:
    try:
        return msgspec.json.decode(metadata.get(_PARTS, ""), type=dict[str, Part])
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"{name} does not say what it holds: {shown(str(error))}", field=name) from None


def _copy(file: Any, fresh: torch.Tensor, slot: Slot, part: Part, kinds: list[int]) -> int:
    """Copy where the file's part and this rank's overlap. Returns how many numbers that were, of each kind."""
    if part.shape != slot.shape:
        raise InvalidRequest(f"{slot.name} is {list(part.shape)} in the checkpoint, not {list(slot.shape)}")
    axis = max(part.axis, 0) if slot.axis is None else slot.axis
    if part.axis not in (-1, axis):
        raise InvalidRequest(f"{slot.name} is split along axis {part.axis} in the checkpoint", field=slot.name)
    have = (part.start, part.stop) if part.axis >= 0 else (0, slot.shape[axis])
    want = (slot.start, slot.stop) if slot.axis is not None else (0, slot.shape[axis])
    first, last = max(have[0], want[0]), min(have[1], want[1])
    if first >= last:
        return 0
    source = (slice(None),) * axis + (slice(first - have[0], last - have[0]),)
    target = (slice(None),) * axis + (slice(first - want[0], last - want[0]),)
    copied = 0
    for kind in kinds:
        values = file.get_slice(f"{KINDS[kind]}/{slot.name}")[source]
        view(fresh[kind], slot)[target].copy_(values)
        copied = values.numel()
    return copied
