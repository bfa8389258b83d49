"""An adapter in the one form that SGLang computes as PEFT does: one rank, one alpha, whole groups, experts stacked.

SGLang reads ``r`` and ``lora_alpha`` and nothing else of how an adapter scales: rsLoRA and patterns are ignored. Scales
that differ from pair to pair are folded into B here and ranks are filled up with zeros; rsLoRA becomes the alpha that
gives its scale. q, k and v are one matrix to it, gate and up another: it breaks, or takes one for the other, where a
part is missing, so that missing parts are written as zeros. Experts are (experts, rank, in) and (experts, out, rank)
under one name, a factor that all of them share repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from packer import adapter_config
from packer.copying import DTYPES
from packer.folder import new_folder
from packer.modules import EXPERT_PATHS, PEFT_PREFIX, Place
from packer.peft import TENSORS_NAME
from packer.plain import FUSED_GATE_UP, GATE, UP, apart, header, keeps_stacks
from packer.revision import Pair, RevisionFile
from packer.scaling import fold, round_as, scale, widen
from packer.shape import BaseShape
from wire.outcomes import Unfit

from .terms import TARGETS

GROUPS = (("q", "k", "v"), ("gate", "up"))
_MLP = frozenset(("gate", "up", "down"))
EXPERTS = "experts."


def targets_of(base: BaseShape | None) -> frozenset[str]:
    """Our names of what SGLang lets adapters change: of a base with experts no dense layer's MLP, and nothing at all
    where gate and up alternate (gpt-oss). Of a base that is not known all that it takes of any.
    """
    taken = frozenset((*TARGETS.values(), *EXPERT_PATHS))
    if base is None:
        return taken
    if keeps_stacks(base):
        return frozenset()
    here = taken.intersection(chain.from_iterable(base.modules))
    return here - _MLP if here & EXPERT_PATHS.keys() else here


def check_fit(file: RevisionFile, base: BaseShape | None) -> None:
    """Raises Unfit for what SGLang would leave out of an adapter."""
    taken = targets_of(base)
    for pair in file.pairs:
        if pair.place.module not in taken:
            told = f"of this base it takes {', '.join(sorted(taken))}" if taken else "it takes no adapters of this base"
            raise Unfit(f"an SGLang engine can't change {pair.place}: {told}", field=str(pair.place))


class Row(NamedTuple):
    """One module as SGLang reads it, and what of the file it is: nothing (zeros), or ``rows`` of B of ``source``."""

    stem: str
    pair: Pair
    source: Pair | None
    rows: slice


def rows_of(file: RevisionFile, base: BaseShape | None) -> list[Row]:
    """Every module that the adapter changes, and those that only complete a group. Raises Unfit."""
    check_fit(file, base)
    content = apart(file.content, base)
    sources = {pair.place: pair for pair in file.pairs}
    pairs = {pair.place: pair for pair in content.pairs}
    for layer in sorted({place.layer for place in pairs}):
        for group in GROUPS:
            given = [Place(layer, module) for module in group if Place(layer, module) in pairs]
            for module in group if given else ():
                place = Place(layer, module)
                pairs.setdefault(place, _blank(place, pairs[given[0]], base))
    rows = [_row(pair, content.manifest.path(pair.place.module), sources) for pair in pairs.values()]
    return sorted(rows, key=lambda row: row.pair.place.order)


def _blank(place: Place, like: Pair, base: BaseShape | None) -> Pair:
    """A pair that changes nothing, at a place that the adapter leaves alone."""
    known = base.get(place) if base is not None else None
    if known is None:
        raise Unfit(f"the size of {place} can't be known without the base's config.json: give the engine's model_path",
                    field="model_path")  # fmt: skip
    return Pair(place, like.rank, like.alpha, known.inputs, known.outputs)


def _row(pair: Pair, path: str, sources: dict[Place, Pair]) -> Row:
    place = pair.place
    stem = f"{PEFT_PREFIX}layers.{place.layer}.{path.replace('.{}', '')}"
    source, rows = sources.get(place), slice(None)
    if source is None and place.module in (GATE, UP):
        source = sources.get(Place(place.layer, FUSED_GATE_UP))
        rows = slice(pair.outputs) if place.module == GATE else slice(pair.outputs, None)
    return Row(stem, pair, source, rows)


def write_for_sglang(buffer: bytes | memoryview, folder: Path, *, dtype: str, base: BaseShape | None) -> None:
    """``folder`` appears whole or not at all. ``dtype`` is the engine's: what is folded is rounded to it before.

    Raises InvalidRequest, Unfit, StorageFull.
    """
    file = RevisionFile(buffer)
    rows = rows_of(file, base)
    uneven = is_uneven(file)
    rank = max(pair.rank for pair in file.pairs)
    b_dtype = "F32" if uneven else file.dtype
    described: list[tuple[str, str, tuple[int, ...]]] = []
    for row in rows:
        stack = row.pair.experts[:1] if row.pair.place.expert else ()
        described.append((f"{row.stem}.lora_A.weight", file.dtype, (*stack, rank, row.pair.inputs)))
        described.append((f"{row.stem}.lora_B.weight", b_dtype, (*stack, row.pair.outputs, rank)))
    with new_folder(folder) as draft:
        (draft / adapter_config.NAME).write_bytes(_config(file, rows, rank, uneven))
        with (draft / TENSORS_NAME).open("wb") as out:
            out.write(header(described))
            for row in rows:
                for factor in _factors(file, row, rank, dtype if uneven else ""):
                    out.write(np.ascontiguousarray(factor).reshape(-1).view(np.uint8).data)


def is_uneven(file: RevisionFile) -> bool:
    """Whether its pairs differ in rank or scale."""
    return bool(file.manifest.ranks or file.manifest.alphas)


def _config(file: RevisionFile, rows: list[Row], rank: int, uneven: bool) -> bytes:
    manifest = file.manifest
    alpha = rank if uneven else rank * scale(manifest.alpha, manifest.rank, rslora=manifest.rslora)
    changed = {row.pair.place.module.removeprefix(EXPERTS) for row in rows}
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": alpha,
        "target_modules": [name for name, ours in TARGETS.items() if ours in changed], "use_dora": False,
        "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    return msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"


def _factors(file: RevisionFile, row: Row, rank: int, folded: str) -> Iterator[npt.NDArray[Any]]:
    """A, then B, of all the row's experts, filled up to ``rank``; ``folded`` names the dtype to fold B's scale in."""
    pair, source = row.pair, row.source
    stack = pair.experts[:1] if pair.place.expert else ()
    a = np.zeros((*stack, rank, pair.inputs), DTYPES[file.dtype])
    b = np.zeros((*stack, pair.outputs, rank), np.dtype("<f4") if folded else DTYPES[file.dtype])
    if source is not None:
        a[..., : source.rank, :] = _values(file, source, "A")
        values = _values(file, source, "B")[..., row.rows, :]
        if folded:
            values = fold(round_as(widen(np.ascontiguousarray(values), file.dtype), folded), file.scale(source))
        b[..., : source.rank] = values
    yield a
    yield b


def _values(file: RevisionFile, source: Pair, factor: str) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = np.frombuffer(file.tensor(f"{source.place}.{factor}"), DTYPES[file.dtype])
    return values.reshape(source.shapes["AB".index(factor)])
