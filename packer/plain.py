"""What a stock engine loads of an adapter that came in another form: three pairs for every expert, all of one rank.

vLLM takes a layer's experts only where each of them has gate, up and down: what an adapter leaves out is written as
zeros. A fused gate_up is one A under both names and B's rows halved; a factor that all experts share is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packer import adapter_config
from packer.copying import DTYPES
from packer.folder import new_folder
from packer.layouts import PER_EXPERT, tensor_stems
from packer.modules import EXPERT_PATHS, PEFT_PREFIX, Place
from packer.peft import TENSORS_NAME
from packer.revision import Content, Pair, RevisionFile, make_content
from packer.safetensors_header import ITEM_BYTES, TensorSpec, encode_header
from packer.scaling import fold, round_as, widen
from packer.shape import BaseShape
from packer.unpacked_config import unpacked_config
from wire.outcomes import Unfit

GATE, UP, DOWN = "experts.gate", "experts.up", "experts.down"
FUSED_GATE_UP = "experts.gate_up"
_TRIPLET = (GATE, UP, DOWN)
_METADATA = {"format": "pt"}


def keeps_stacks(base: BaseShape | None) -> bool:
    """Whether engines take the base's experts as PEFT stacks them, and in no other way (gpt-oss)."""
    if base is None:
        return False
    return any(module.interleaved for layer in base.modules for module in layer.values())


def is_plain(content: Content) -> bool:
    """Whether engines load it as it was: no exceptions of rank or alpha, and each expert whole and apart."""
    manifest = content.manifest
    if manifest.ranks or manifest.alphas or manifest.layout != PER_EXPERT:
        return False
    experts: dict[int, set[str]] = {}
    for pair in content.pairs:
        if pair.place.expert:
            experts.setdefault(pair.place.layer, set()).add(pair.place.module)
    return all(len(modules) == len(_TRIPLET) for modules in experts.values())


def write_plain(file: RevisionFile, folder: Path, dtype: str, base: BaseShape | None) -> None:
    """``folder`` appears whole or not at all. Scales are folded into B where they differ from pair to pair.

    Raises Unfit for experts whose names or order in the base can't be known from the file, where ``base`` is None.
    """
    uneven = bool(file.manifest.ranks or file.manifest.alphas)
    content = apart(file.content, base)
    rank = max(pair.rank for pair in content.pairs)
    rows = sorted(_rows(file, content), key=lambda row: row.stem)
    computing: dict[str, Any] = {"r": rank, "lora_alpha": rank, "use_rslora": False}
    if not uneven:
        manifest = content.manifest
        computing = {"r": manifest.rank, "lora_alpha": manifest.alpha, "use_rslora": manifest.rslora}
    config = unpacked_config(content, PEFT_PREFIX, "", **computing, rank_pattern={}, alpha_pattern={})
    b_dtype = "F32" if uneven else file.dtype
    described: list[tuple[str, str, tuple[int, ...]]] = []
    for row in rows:
        described.append((f"{row.stem}.lora_A.weight", file.dtype, (rank, row.pair.inputs)))
        described.append((f"{row.stem}.lora_B.weight", b_dtype, (row.pair.outputs, rank)))
    with new_folder(folder) as draft:
        (draft / adapter_config.NAME).write_bytes(config)
        with (draft / TENSORS_NAME).open("wb") as out:
            out.write(header(described))
            for row in rows:
                out.write(_bytes(_a_of(file, row, rank)))
                out.write(_bytes(_folded_b(file, row, rank, dtype) if uneven else _b_of(file, row)))


def header(described: list[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """A safetensors header as the stock writer makes it, of (name, dtype, shape) in order of their bytes."""
    tensors = {}
    position = 0
    for name, dtype, shape in described:
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        tensors[name] = TensorSpec(dtype, shape, (position, end))
        position = end
    return encode_header(tensors, _METADATA)


class _Row(NamedTuple):
    """One module as an engine names it, and what of the file it is: nothing (zeros), or ``rows`` of B of ``source``."""

    stem: str
    pair: Pair
    source: Pair | None
    number: int
    rows: slice


def apart(content: Content, base: BaseShape | None) -> Content:
    """The same adapter with each layer's experts as gate, up and down."""
    pairs = [pair for pair in content.pairs if not pair.place.expert]
    for layer in sorted({pair.place.layer for pair in content.pairs if pair.place.expert}):
        given = {pair.place.module: pair for pair in content.pairs if pair.place.expert and pair.place.layer == layer}
        pairs += _triplet(layer, given, content, base)
    manifest = content.manifest
    paths = {module: manifest.path(module) for module in manifest.targets if module not in EXPERT_PATHS}
    return make_content(
        pairs, content.dtype, rank=manifest.rank, alpha=manifest.alpha, rslora=manifest.rslora,
        paths={**paths, **_expert_paths(content, base)},
    )  # fmt: skip


def _triplet(layer: int, given: dict[str, Pair], content: Content, base: BaseShape | None) -> Iterator[Pair]:
    experts = max(max(pair.experts) for pair in given.values())
    hidden, inner = _sizes(given)
    for module, (inputs, outputs) in zip(_TRIPLET, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True):
        place = Place(layer, module)
        known = base.get(place) if base is not None else None
        source = _source(given, module)
        rank, alpha = (source.rank, source.alpha) if source else (content.manifest.rank, content.manifest.alpha)
        stack = known.experts if known is not None else experts
        yield Pair(place, rank, alpha, inputs, outputs, (stack, stack))


def _sizes(given: dict[str, Pair]) -> tuple[int, int]:
    """(hidden size, an expert's inner size)."""
    for module, pair in given.items():
        if module == DOWN:
            return pair.outputs, pair.inputs
        return pair.inputs, pair.outputs // 2 if module == FUSED_GATE_UP else pair.outputs
    raise ValueError("a layer without experts has no sizes of theirs")


def _source(given: dict[str, Pair], module: str) -> Pair | None:
    return given.get(module) or (given.get(FUSED_GATE_UP) if module != DOWN else None)


def _expert_paths(content: Content, base: BaseShape | None) -> dict[str, str]:
    """Where the base keeps each expert's modules."""
    here = {pair.place for pair in content.pairs if pair.place.expert}
    if not here:
        return {}
    if base is not None:
        layer = min(place.layer for place in here)
        modules = {module: base.get(Place(layer, module)) for module in _TRIPLET}
        return {module: found.path for module, found in modules.items() if found is not None}
    given = {place.module for place in here}
    unusual = content.manifest.paths.keys() & set(EXPERT_PATHS)
    if FUSED_GATE_UP in given or (unusual and not given >= set(_TRIPLET)):
        raise Unfit(
            "how the base lays out its experts can't be known without its config.json: give the engine's model_path",
            field="model_path",
        )
    return {module: content.manifest.path(module) for module in _TRIPLET}


def _rows(file: RevisionFile, content: Content) -> Iterator[_Row]:
    sources = {pair.place: pair for pair in file.pairs}
    for pair in content.pairs:
        place = pair.place
        source, rows = sources.get(place), slice(None)
        if source is None and place.module in (GATE, UP):
            source = sources.get(Place(place.layer, FUSED_GATE_UP))
            rows = slice(pair.outputs) if place.module == GATE else slice(pair.outputs, None)
        stems = tensor_stems(
            place, content.manifest.path(place.module), pair.experts[0], layout=PER_EXPERT, prefix=PEFT_PREFIX
        )
        for number, stem in enumerate(stems):
            yield _Row(stem, pair, source, number, rows)


def _factor(file: RevisionFile, source: Pair, factor: str, number: int) -> npt.NDArray[Any]:
    """A or B in two dimensions, of a stack those of one expert, or the one that all share."""
    values = np.frombuffer(file.tensor(f"{source.place}.{factor}"), DTYPES[file.dtype])
    stack = values.reshape(-1, *source.shapes["AB".index(factor)][-2:])
    one: npt.NDArray[Any] = stack[number if len(stack) > 1 else 0]
    return one


def _a_of(file: RevisionFile, row: _Row, rank: int) -> npt.NDArray[Any]:
    """A with zero rows below it."""
    a = np.zeros((rank, row.pair.inputs), DTYPES[file.dtype])
    if row.source is not None:
        a[: row.source.rank] = _factor(file, row.source, "A", row.number)
    return a


def _b_of(file: RevisionFile, row: _Row) -> npt.NDArray[Any]:
    if row.source is None:
        return np.zeros((row.pair.outputs, row.pair.rank), DTYPES[file.dtype])
    return _factor(file, row.source, "B", row.number)[row.rows]


def _folded_b(file: RevisionFile, row: _Row, rank: int, dtype: str) -> npt.NDArray[Any]:
    """B with its scale folded in and zero columns beside it."""
    b = np.zeros((row.pair.outputs, rank), np.dtype("<f4"))
    if row.source is not None:
        values = np.ascontiguousarray(_b_of(file, row))
        b[:, : row.source.rank] = fold(round_as(widen(values, file.dtype), dtype), file.scale(row.source))
    return b


def _bytes(factor: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(factor).reshape(-1).view(np.uint8).data
