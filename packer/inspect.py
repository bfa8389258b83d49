"""What an adapter is, for a person who wants to know: of a PEFT folder or a revision file, fit or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from packer.adapter_config import AdapterConfig
from packer.implied import shape_of_pairs, shape_of_tensors
from packer.modules import ORDER
from packer.peft import PeftFolder, account, open_peft, pack_opened
from packer.revision import Content, Pair, RevisionFile, check_fit
from packer.safetensors_header import TensorSpec
from packer.scaling import scale
from packer.shape import BaseShape
from wire.events import ArtifactFacts
from wire.outcomes import RoostError

PEFT = "PEFT folder"
REVISION = "revision file"


class ModuleSummary(msgspec.Struct, frozen=True):
    """One kind of module with one rank and alpha: the layers it acts in ("0-27, 30"), dimensions, scale, parameters."""

    module: str
    layers: str
    inputs: int
    outputs: int
    rank: int
    alpha: int | float
    scale: float
    parameters: int


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """``refusal`` says why the adapter would not be taken, empty if it would be; then ``facts`` are known.

    ``compared`` names the architecture that it was checked against: empty without a base, when only what the adapter
    says of itself was checked.
    """

    kind: str
    refusal: str = ""
    compared: str = ""
    facts: ArtifactFacts | None = None
    rslora: bool = False
    modules: tuple[ModuleSummary, ...] = ()
    trained_on: str = ""
    task: str = ""
    dtypes: tuple[str, ...] = ()
    tensors: int = 0
    bytes: int = 0


def inspect(path: Path, shape: BaseShape | None = None) -> Inspection:
    """Look at all of an adapter, its values included. A bad one is described, not raised."""
    kind = PEFT if path.is_dir() else REVISION
    compared = shape.architecture if shape else ""
    try:
        return _inspect_peft(open_peft(path), shape) if kind == PEFT else _inspect_revision(path, shape)
    except RoostError as error:
        return Inspection(kind=kind, refusal=error.message, compared=compared)


def _inspect_revision(path: Path, shape: BaseShape | None) -> Inspection:
    file = RevisionFile.open(path)
    summary = _summary(REVISION, file.specs.values(), file.buffer.nbytes, shape)
    described = _described(file.content)
    try:
        check_fit(file, shape or shape_of_pairs(file.pairs, file.manifest))
    except RoostError as error:
        return Inspection(**summary, **described, refusal=error.message)
    return Inspection(**summary, **described, facts=file.facts())


def _inspect_peft(source: PeftFolder, shape: BaseShape | None) -> Inspection:
    config: AdapterConfig = source.config
    summary = _summary(PEFT, source.header.tensors.values(), source.file.nbytes, shape)
    summary.update(trained_on=config.base_model, task=config.task)
    against = shape or shape_of_tensors(config, source.header.tensors, source.prefix)
    described: dict[str, Any] = {}
    try:
        described = _described(account(source, against).content)
        facts = pack_opened(source, against, _Nowhere())
    except RoostError as error:
        return Inspection(**summary, **described, refusal=error.message)
    return Inspection(**summary, **described, facts=facts)


class _Nowhere:
    """Takes the revision file that is made only to be checked and hashed."""

    def write(self, data: Any, /) -> None:
        pass


def _summary(kind: str, specs: Iterable[TensorSpec], size: int, shape: BaseShape | None) -> dict[str, Any]:
    dtypes = [spec.dtype for spec in specs]
    return {
        "kind": kind,
        "compared": shape.architecture if shape else "",
        "dtypes": tuple(sorted(set(dtypes))),
        "tensors": len(dtypes),
        "bytes": size,
    }


def _described(content: Content) -> dict[str, Any]:
    rslora = content.manifest.rslora
    alike: dict[tuple[Any, ...], list[Pair]] = {}
    for pair in content.pairs:
        key = (ORDER[pair.place.module], pair.inputs, pair.outputs, pair.rank, pair.alpha)
        alike.setdefault(key, []).append(pair)
    modules = tuple(_module_summary(pairs, rslora) for _, pairs in sorted(alike.items()))
    return {"rslora": rslora, "modules": modules}


def _module_summary(pairs: Sequence[Pair], rslora: bool) -> ModuleSummary:
    first = pairs[0]
    return ModuleSummary(
        module=first.place.module,
        layers=ranges([pair.place.layer for pair in pairs]),
        inputs=first.inputs,
        outputs=first.outputs,
        rank=first.rank,
        alpha=first.alpha,
        scale=scale(first.alpha, first.rank, rslora=rslora),
        parameters=sum(sum(pair.elements) for pair in pairs),
    )


def ranges(numbers: Sequence[int]) -> str:
    """Ascending ``numbers`` as a person writes them: 0-27, 30."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
