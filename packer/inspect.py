"""What an adapter is, for a person who wants to know: of a PEFT folder or a revision file, fit or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from packer.accounting import Adapter, account
from packer.folder import confined, map_file
from packer.implied import shape_of_pairs, shape_of_tensors
from packer.layouts import LAYOUTS
from packer.megatron import is_sharded, open_shards, pack_shards
from packer.modules import ORDER
from packer.peft import TENSORS_NAME, adapter_of, open_peft, pack_opened
from packer.revision import Content, Pair, RevisionFile, check_fit
from packer.safetensors_header import TensorSpec, parse_header
from packer.scaling import scale
from packer.shape import BaseShape
from wire.events import ArtifactFacts
from wire.outcomes import RoostError

PEFT = "PEFT folder"
REVISION = "revision file"
MEGATRON = "Megatron shards"
# as many numbers at one distance are a run worth naming by its ends
_LEAST_STEPPED = 4


class ModuleSummary(msgspec.Struct, frozen=True):
    """One kind of module with one rank and alpha: the layers it acts in ("0-27, 30"), dimensions, scale, parameters.

    ``experts`` is how many there are in each layer, 0 for a module that is no stack; ``shared`` the factor (A, B or
    AB) that is one for all of them. ``alternating`` says that the base's fused outputs are gate, up, gate, up.
    """

    module: str
    layers: str
    inputs: int
    outputs: int
    rank: int
    alpha: int | float
    scale: float
    parameters: int
    experts: int = 0
    shared: str = ""
    alternating: bool = False


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """``refusal`` says why the adapter would not be taken, empty if it would be; then ``facts`` are known.

    ``compared`` names the architecture that it was checked against: empty without a base, when only what the adapter
    says of itself was checked. ``layout`` says how the adapter's files lay out its experts, empty if it has none;
    ``job`` how a trainer split it; ``further`` which of its layers are known to predict further tokens (MTP). Of what
    can't be read there are no tensors.
    """

    kind: str
    refusal: str = ""
    compared: str = ""
    facts: ArtifactFacts | None = None
    rslora: bool = False
    modules: tuple[ModuleSummary, ...] = ()
    trained_on: str = ""
    task: str = ""
    layout: str = ""
    job: str = ""
    further: str = ""
    dtypes: tuple[str, ...] = ()
    tensors: int = 0
    bytes: int = 0


def inspect(path: Path, shape: BaseShape | None = None) -> Inspection:
    """Look at all of an adapter, its values included. A bad one is described, not raised."""
    kind = (MEGATRON if is_sharded(path) else PEFT) if path.is_dir() else REVISION
    look = {MEGATRON: _inspect_shards, PEFT: _inspect_peft, REVISION: _inspect_revision}[kind]
    try:
        return look(path, shape)
    except RoostError as error:
        return Inspection(**_outside(kind, path, shape), refusal=error.message)


def _outside(kind: str, path: Path, shape: BaseShape | None) -> dict[str, Any]:
    """What the header alone tells of an adapter that is refused before more is known."""
    try:
        file = map_file(path if kind == REVISION else confined(path, TENSORS_NAME))
        return _summary(kind, parse_header(file, TENSORS_NAME).tensors.as_dict().values(), file.nbytes, shape)
    except RoostError:
        return _summary(kind, (), 0, shape)


def _inspect_revision(path: Path, shape: BaseShape | None) -> Inspection:
    file = RevisionFile.open(path)
    summary = _summary(REVISION, file.specs.values(), file.buffer.nbytes, shape)
    described = _described(file.content, shape)
    try:
        check_fit(file, shape or shape_of_pairs(file.pairs, file.manifest))
    except RoostError as error:
        return Inspection(**summary, **described, refusal=error.message)
    return Inspection(**summary, **described, facts=file.facts())


def _inspect_peft(path: Path, shape: BaseShape | None) -> Inspection:
    source = open_peft(path)
    summary = _summary(PEFT, source.header.tensors.as_dict().values(), source.file.nbytes, shape)
    return _inspect_adapter(
        summary, adapter_of(source), shape, lambda against: pack_opened(source, against, _Nowhere())
    )


def _inspect_shards(path: Path, shape: BaseShape | None) -> Inspection:
    source = open_shards(path)
    summary = _summary(MEGATRON, source.adapter.tensors.as_dict().values(), source.size, shape)
    summary["job"] = source.groups.words()
    return _inspect_adapter(summary, source.adapter, shape, lambda against: pack_shards(source, against, _Nowhere()))


def _inspect_adapter(
    summary: dict[str, Any], adapter: Adapter, shape: BaseShape | None, pack: Callable[[BaseShape], ArtifactFacts]
) -> Inspection:
    """What an adapter that is not packed yet would be as a revision; ``pack`` packs it."""
    config = adapter.config
    summary.update(
        trained_on=config.base_model,
        task=config.task,
    )
    against = shape or shape_of_tensors(config, adapter.tensors.as_dict(), adapter.prefix)
    described: dict[str, Any] = {}
    try:
        described = _described(account(adapter, against).content, shape)
        facts = pack(against)
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


def _described(content: Content, shape: BaseShape | None) -> dict[str, Any]:
    rslora = content.manifest.rslora
    alike: dict[tuple[Any, ...], list[Pair]] = {}
    for pair in content.pairs:
        key = (ORDER[pair.place.module], pair.inputs, pair.outputs, pair.rank, pair.alpha, pair.experts)
        alike.setdefault(key, []).append(pair)
    layers = sorted({pair.place.layer for pair in content.pairs})
    stacks = any(pair.place.expert for pair in content.pairs)
    return {
        "rslora": rslora,
        "modules": tuple(_module_summary(pairs, rslora, shape) for _, pairs in sorted(alike.items())),
        "layout": LAYOUTS[content.manifest.layout] if stacks else "",
        "further": ranges([layer for layer in layers if shape and layer >= shape.layers - shape.mtp]),
    }


def _module_summary(pairs: Sequence[Pair], rslora: bool, shape: BaseShape | None) -> ModuleSummary:
    first = pairs[0]
    module = shape.get(first.place) if shape else None
    return ModuleSummary(
        module=first.place.module,
        layers=ranges([pair.place.layer for pair in pairs]),
        inputs=first.inputs,
        outputs=first.outputs,
        rank=first.rank,
        alpha=first.alpha,
        scale=scale(first.alpha, first.rank, rslora=rslora),
        parameters=sum(sum(pair.elements) for pair in pairs),
        experts=max(first.experts),
        shared="".join(factor for factor, count in zip("AB", first.experts, strict=True) if count < max(first.experts)),
        alternating=module is not None and module.interleaved,
    )


def ranges(numbers: Sequence[int]) -> str:
    """Ascending ``numbers`` as a person writes them: 0-27, 30, 34-74 by 4."""
    spans = []
    while numbers:
        step, length = _run(numbers)
        if step > 1 and length < _LEAST_STEPPED:
            length = 1
        first, last = numbers[0], numbers[length - 1]
        spans.append(str(first) if length == 1 else f"{first}-{last}" + (f" by {step}" if step > 1 else ""))
        numbers = numbers[length:]
    return ", ".join(spans)


def _run(numbers: Sequence[int]) -> tuple[int, int]:
    """(step, length) of the longest run of equal steps that ``numbers`` begin with."""
    if len(numbers) == 1:
        return 1, 1
    step = numbers[1] - numbers[0]
    length = next((place for place in range(2, len(numbers)) if numbers[place] - numbers[place - 1] != step), None)
    return step, length or len(numbers)
