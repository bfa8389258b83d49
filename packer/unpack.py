"""From a revision file back to PEFT folders: the adapter as it came, or an equivalent for engines that know less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from packer import adapter_config
from packer.copying import Progress, copy
from packer.folder import new_folder
from packer.layouts import BLOCKWISE, PER_EXPERT, STACKED, tensor_stems
from packer.modules import PEFT_PREFIX
from packer.peft import TENSORS_NAME
from packer.plain import header, is_plain, keeps_stacks, write_plain
from packer.plan import CopyPlan, Runs, Segment, Turned
from packer.revision import RevisionFile
from packer.safetensors_header import ITEM_BYTES
from packer.shape import BaseShape
from packer.unpacked_config import module_pattern, unpacked_config
from wire.outcomes import Unfit


def write_peft(
    buffer: bytes | memoryview, folder: Path, *, base_model: str = "", progress: Progress | None = None
) -> None:
    """Write the adapter as it was packed: tensors bit for bit, their names, and what its configuration computed.

    Patterns come back resolved, module by module. ``folder`` appears whole or not at all. Raises InvalidRequest,
    StorageFull, ArtifactUnavailable.
    """
    file = RevisionFile(buffer)
    prefix = file.manifest.prefix or PEFT_PREFIX
    _write_exact(file, folder, prefix, base_model, progress)


def write_engine_peft(
    buffer: bytes | memoryview, folder: Path, *, dtype: str = "", base: BaseShape | None = None
) -> None:
    """Write what an engine is to load, so that it computes what PEFT computes.

    An adapter of one rank and one alpha is written as ``write_peft`` would, under the usual names. One with
    exceptions becomes a plain adapter that any engine understands: each module's scale is folded into B, in fp32,
    and ranks are filled up with zeros to one. ``dtype`` (bfloat16, float16) is the engine's: B is rounded to it
    before the product, as the engine itself does, so that the outcome is the same to the last bit. Experts are
    written one by one, each whole (``packer.plain``), except for a ``base`` whose engines take them stacked.
    Raises Unfit for what can't be written so, or not without ``base``.
    """
    file = RevisionFile(buffer)
    uneven = file.manifest.ranks or file.manifest.alphas
    stacked = file.manifest.layout != PER_EXPERT and keeps_stacks(base)
    if stacked and uneven:
        raise Unfit(
            "experts of unlike ranks or alphas in a stacked layout can't be written for an engine of the portable path",
            field="layout",
        )
    if stacked or is_plain(file.content):
        _write_exact(file, folder, PEFT_PREFIX, "", None)
    else:
        write_plain(file, folder, dtype, base)


def _write_exact(file: RevisionFile, folder: Path, prefix: str, base_model: str, progress: Progress | None) -> None:
    dtype = file.manifest.source or file.dtype
    tensors = sorted(_originals(file, prefix), key=lambda tensor: tensor.name)
    written = header([(tensor.name, dtype, tensor.shape) for tensor in tensors])
    manifest = file.manifest
    config = unpacked_config(
        file.content,
        prefix,
        base_model,
        r=manifest.rank,
        lora_alpha=manifest.alpha,
        use_rslora=manifest.rslora,
        rank_pattern={module_pattern(manifest, key, prefix): rank for key, rank in manifest.ranks.items()},
        alpha_pattern={module_pattern(manifest, key, prefix): alpha for key, alpha in manifest.alphas.items()},
    )
    with new_folder(folder) as draft:
        (draft / adapter_config.NAME).write_bytes(config)
        with (draft / TENSORS_NAME).open("wb") as out:
            out.write(written)
            copy(_plan(file, tensors), file.dtype, dtype, out, progress)


class _Original(NamedTuple):
    """A tensor as it came: ``offset`` and ``length`` are its bytes' in the revision file.

    ``turn`` says how a stack's B, (experts, out, rank), became (out, columns).
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    length: int
    turn: tuple[int, int, int] | None = None
    stored: tuple[int, ...] = ()


_TURNS = {STACKED: (1, 2, 0), BLOCKWISE: (1, 0, 2)}


def _originals(file: RevisionFile, prefix: str) -> Iterator[_Original]:
    layout = file.manifest.layout
    beside: dict[int, set[str]] = {}
    for pair in file.pairs:
        beside.setdefault(pair.place.layer, set()).add(pair.place.module)
    for pair in file.pairs:
        place = pair.place
        stems = tensor_stems(
            place, file.manifest.path(place.module), pair.experts[0],
            layout=layout, prefix=prefix, beside=beside[place.layer],
        )  # fmt: skip
        for factor, shape in zip("AB", pair.shapes, strict=True):
            start, end = file.specs[f"{place}.{factor}"].data_offsets
            offset, length = file.data_start + start, end - start
            names = [f"{stem}.lora_{factor}.weight" for stem in stems]
            if place.expert and layout in _TURNS:
                experts, rows, columns = shape
                merged = (experts * rows, columns) if factor == "A" else (rows, columns * experts)
                turn = _TURNS[layout] if factor == "B" else None
                yield _Original(names[0], merged, offset, length, turn, shape)
            elif place.expert and layout == PER_EXPERT:
                step = length // len(names)
                for number, name in enumerate(names):
                    yield _Original(name, shape[1:], offset + number * step, step)
            else:
                yield _Original(names[0], shape, offset, length)


def _plan(file: RevisionFile, tensors: Sequence[_Original]) -> CopyPlan:
    source = np.frombuffer(file.buffer, dtype=np.uint8)
    item = np.dtype((np.void, ITEM_BYTES[file.dtype]))
    segments: list[Segment] = []
    for turned, group in groupby(tensors, key=lambda tensor: tensor.turn is not None):
        if turned:
            for tensor in group:
                stored = source[tensor.offset : tensor.offset + tensor.length].view(item).reshape(tensor.stored)
                segments.append(Turned(stored.transpose(tensor.turn), tensor.name))
            continue
        plain = list(group)
        offsets, lengths = [tensor.offset for tensor in plain], [tensor.length for tensor in plain]
        segments.append(Runs([source], offsets, lengths, [tensor.name for tensor in plain]))
    return CopyPlan(segments)
