"""Every tensor of an adapter accounted for: what the configuration asks for is there, and nothing else is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from catalog.names import shown
from packer.adapter_config import AdapterConfig
from packer.layouts import (
    BLOCKWISE,
    FUSED,
    OUTER,
    OUTER_NAMES,
    PER_EXPERT,
    STACKED,
    container_of,
    layout_of,
    tensor_stems,
)
from packer.modules import PATHS, PEFT_PREFIX, Place
from packer.revision import Content, Pair, check_pair, make_content
from packer.safetensors_header import Tensors
from packer.shape import BaseShape, ModuleShape
from wire.outcomes import InvalidRequest, Unfit

# what a module's name begins with for the trainer that saw the whole model or the bare one
_WRAPPER = "base_model.model."
# what a tensor's name gives away about the feature that wrote it
_FEATURES = {
    "lora_magnitude_vector": "DoRA is not served",
    "lora_embedding_": "adapted embeddings are not served",
    "modules_to_save": "modules_to_save is not served",
    "embed_tokens": "embeddings saved with an adapter are not served",
    "lm_head": "an adapted output layer is not served",
    ".bias": "biases are not served",
    "token_adapter": "trainable tokens are not served",
}
# modules that some releases of a model have as linear layers and others as bare parameters: whether a trainer could
# see them by name shows in what it saved
_SOMETIMES = frozenset({"router", "experts.gate", "experts.up", "experts.down"})
# before this one, PEFT took the input and output dimension of (experts, out, in) for each other
_PEFT_TURNED = (0, 19)

Integers = npt.NDArray[np.int64]


class Unit(NamedTuple):
    """An adapted module: what its tensors are called (without ``.lora_A.weight``), one or one an expert.

    ``known_as`` are the names by which a configuration can mean it; those of the first decide on rank and alpha.
    """

    place: Place
    module: ModuleShape
    stems: list[str]
    known_as: list[str]

    def names(self, factor: str) -> list[str]:
        ending = f".lora_{factor}.weight"
        return [stem + ending for stem in self.stems]


class Account(NamedTuple):
    """The content of an adapter, and where its tensors are.

    ``names`` are those of A, then of B, of the first pair, and so on; ``rows`` their places in the header, and the
    i-th factor's are those from ``bounds[i]`` up to ``bounds[i + 1]``.
    """

    content: Content
    names: list[str]
    rows: Integers
    bounds: Integers


class Adapter(NamedTuple):
    """What is to be accounted for: tensors by name, as ``what`` calls their file, and what is said about them."""

    config: AdapterConfig
    tensors: Tensors
    metadata: Mapping[str, str]
    prefix: str
    dtype: str
    what: str


def account(adapter: Adapter, shape: BaseShape) -> Account:
    """What the adapter holds, once every tensor that its configuration asks for is there, and no other.

    Raises InvalidRequest or Unfit that name the tensor or the field.
    """
    layout = layout_of(adapter.tensors)
    units = _chosen(adapter, shape, layout)
    names, rows = _complete(units, adapter, shape)
    bounds = np.cumsum([0, *(len(unit.stems) for unit in units for _ in "AB")])
    shapes = iter(_shapes(names, rows, bounds, adapter.tensors))
    config = adapter.config
    settings = _settings(units, config)
    pairs = []
    for unit, (rank, alpha) in zip(units, settings, strict=True):
        pair = _pair(unit, rank, alpha, next(shapes), next(shapes), layout)
        _check_turn(pair, unit, config, layout)
        check_pair(pair, shape)
        pairs.append(pair)
    order = _column_order(pairs, adapter) if layout == STACKED else layout
    content = make_content(
        pairs, adapter.dtype, rank=config.rank, alpha=config.alpha, rslora=config.rslora,
        prefix="" if adapter.prefix == PEFT_PREFIX else adapter.prefix,
        layout=order if any(pair.place.expert for pair in pairs) else PER_EXPERT,
        paths={unit.place.module: _path(unit.place.module, unit.module, layout) for unit in units},
    )  # fmt: skip
    return Account(content, names, rows, bounds)


def module_name(stem: str) -> str:
    """A module's name as the trainer saw it, from its tensors' names."""
    return stem.removeprefix(_WRAPPER)


def _path(module: str, shape: ModuleShape, layout: str) -> str:
    """Where the tensors of ``module`` are: adapters of stacks use the container of the fused parameter."""
    return PATHS[module] if layout != PER_EXPERT and module in PATHS and "experts." in module else shape.path


def _chosen(adapter: Adapter, shape: BaseShape, layout: str) -> list[Unit]:
    """The units that the configuration adapts, in file order."""
    config = adapter.config
    candidates = _candidates(adapter, shape, layout)
    names = [name for unit in candidates for name in unit.known_as]
    chosen = set(config.selected((*names, *shape.elsewhere), linear=names))
    for name in shape.elsewhere:
        if name in chosen:
            raise Unfit(f"target_modules adapts {name}, which is not served", field="target_modules")
    units = []
    for unit in candidates:
        # where PEFT was told which parameters to stack, names of modules don't mean them
        by_name = not (layout == STACKED and unit.place.expert and config.parameters)
        hits = sum(name in chosen for name in unit.known_as) if by_name else 0
        if hits and layout == PER_EXPERT and hits < len(unit.known_as):
            raise Unfit(
                f"target_modules adapts {hits} of {len(unit.known_as)} experts of {unit.place}: all or none are served",
                field="target_modules",
            )
        if hits or _named_as_parameter(unit, config):
            units.append(unit)
    if not units:
        raise Unfit(f"target_modules matches no module of the base ({shape.architecture})", field="target_modules")
    return _nested(units, adapter.prefix, layout) if layout == STACKED else units


def _candidates(adapter: Adapter, shape: BaseShape, layout: str) -> list[Unit]:
    """What the trainer could have adapted: modules that are linear layers in every release, and what it saved."""
    tensors, prefix = adapter.tensors, adapter.prefix
    units = []
    seen_kinds: set[str] = set()
    built = set(range(shape.layers - shape.mtp))
    if shape.mtp:
        further = {f"{prefix}layers.{layer}.": layer for layer in range(shape.layers - shape.mtp, shape.layers)}
        for name in tensors:
            built.update(layer for start, layer in further.items() if name.startswith(start))
    for place, module in shape.places():
        if place.layer not in built or not _can_hold(place.module, layout):
            continue
        stems = tensor_stems(place, _path(place.module, module, layout), module.experts, layout=layout, prefix=prefix)
        unit = Unit(place, module, stems, _known_as(place, module, stems, adapter, layout))
        units.append(unit)
        if place.module in _SOMETIMES and any(f"{stems[0]}.lora_{factor}.weight" in tensors for factor in "AB"):
            seen_kinds.add(place.module)
    if layout != PER_EXPERT:
        seen_kinds.update(("experts.gate", "experts.up", "experts.down"))
    return [
        unit
        for unit in units
        if unit.place.module not in _SOMETIMES or unit.place.module in seen_kinds
        or _named_as_parameter(unit, adapter.config)
    ]  # fmt: skip


def _can_hold(module: str, layout: str) -> bool:
    if not module.startswith("experts."):
        return True
    if layout == STACKED:
        return module in FUSED
    return module != "experts.gate_up"


def _known_as(place: Place, module: ModuleShape, stems: list[str], adapter: Adapter, layout: str) -> list[str]:
    if not place.expert:
        return [module_name(stems[0])]
    if layout == PER_EXPERT:
        return [module_name(stem) for stem in (stems[:1] if adapter.config.alike else stems)]
    base = module_name(f"{adapter.prefix}layers.{place.layer}.")
    path = _path(place.module, module, layout)
    container = base + container_of(path)
    plain = path.rpartition(".")[2]
    names = [f"{container}.{plain}", container]
    return [*names, f"{container}.{OUTER_NAMES[place.module]}"] if layout == OUTER else names


def _named_as_parameter(unit: Unit, config: AdapterConfig) -> bool:
    if not config.parameters:
        return False
    name = unit.known_as[0] if unit.place.expert else f"{unit.known_as[0]}.weight"
    return config.adapts_parameter(name)


def _nested(units: list[Unit], prefix: str, layout: str) -> list[Unit]:
    """The units with the names that PEFT's nesting gives them, which follow from what is adapted beside them."""
    beside: dict[int, set[str]] = {}
    for unit in units:
        beside.setdefault(unit.place.layer, set()).add(unit.place.module)
    return [
        unit._replace(
            stems=tensor_stems(
                unit.place, _path(unit.place.module, unit.module, layout), unit.module.experts,
                layout=layout, prefix=prefix, beside=beside[unit.place.layer],
            )
        )
        if unit.place.expert else unit
        for unit in units
    ]  # fmt: skip


def _complete(units: Sequence[Unit], adapter: Adapter, shape: BaseShape) -> tuple[list[str], Integers]:
    """The names of all tensors that there should be, and their places in the header."""
    tensors = adapter.tensors
    names = [name for unit in units for factor in "AB" for name in unit.names(factor)]
    found = list(map(tensors.index.get, names))
    rows = np.asarray([row for row in found if row is not None], np.int64)
    if len(rows) != len(tensors):
        expected = set(names)
        raise _extra([name for name in tensors if name not in expected], adapter, shape)
    if len(rows) != len(names):
        missing = [name for name, row in zip(names, found, strict=True) if row is None]
        raise InvalidRequest(
            f"{adapter.what} lacks {_listed(missing)}, which target_modules asks for", field=missing[0]
        )
    return names, rows


def _shapes(names: Sequence[str], rows: Integers, bounds: Integers, tensors: Tensors) -> list[tuple[int, ...]]:
    """The shape of each factor, which all tensors that make it up share."""
    kind = tensors.kind[rows]
    firsts = np.repeat(kind[bounds[:-1]], np.diff(bounds))
    if (kind != firsts).any():
        place = int((kind != firsts).argmax())
        first = int(bounds[int(np.searchsorted(bounds, place, side="right")) - 1])
        raise InvalidRequest(
            f"tensor {names[place]} has the shape {list(tensors.kinds[kind[place]][1])}, but {names[first]} has "
            f"{list(tensors.kinds[kind[first]][1])}",
            field=names[place],
        )
    return [tensors.kinds[first][1] for first in kind[bounds[:-1]].tolist()]


def _settings(units: Sequence[Unit], config: AdapterConfig) -> list[tuple[int, int | float]]:
    """(rank, alpha) of each unit. Raises Unfit where a stack's experts differ in them."""
    spans = [unit.known_as if len(unit.stems) > 1 else unit.known_as[:1] for unit in units]
    found = iter(config.ranks_and_alphas([name for span in spans for name in span]))
    settings = []
    for unit, span in zip(units, spans, strict=True):
        distinct = {next(found) for _ in span}
        if len(distinct) > 1:
            raise Unfit(
                f"the experts of {unit.place} have unlike ranks or alphas: one of each is served", field="rank_pattern"
            )
        settings.append(distinct.pop())
    return settings


def _pair(
    unit: Unit, rank: int, alpha: int | float, a_shape: tuple[int, ...], b_shape: tuple[int, ...], layout: str
) -> Pair:
    dimensions = 3 if unit.place.expert and layout == OUTER else 2
    for factor, shape in (("A", a_shape), ("B", b_shape)):
        if len(shape) != dimensions or 0 in shape:
            name = unit.names(factor)[0]
            words = "two" if dimensions == 2 else "three"
            raise InvalidRequest(f"tensor {name} has the shape {list(shape)}, not {words} dimensions", field=name)
    if not unit.place.expert or layout == PER_EXPERT:
        (rows, inputs), (outputs, columns) = a_shape, b_shape
        experts = (len(unit.stems), len(unit.stems)) if unit.place.expert else (0, 0)
    elif layout == OUTER:
        (a_experts, rows, inputs), (b_experts, outputs, columns) = a_shape, b_shape
        experts = (a_experts, b_experts)
    else:
        (rows, inputs), (outputs, columns) = a_shape, b_shape
        count = unit.module.experts
        experts = (count, count)
        for factor, size in (("A", rows), ("B", columns)):
            if size != count * rank:
                name = unit.names(factor)[0]
                raise InvalidRequest(
                    f"tensor {name} stacks {size} ranks, not {count} experts of rank {rank}, as the configuration says",
                    field=name,
                )
        rows = columns = rank
    for factor, found in (("A", rows), ("B", columns)):
        if found != rank:
            name = unit.names(factor)[0]
            raise InvalidRequest(f"tensor {name} has rank {found}, but the configuration says {rank}", field=name)
    return Pair(unit.place, rank, alpha, inputs, outputs, experts)


def _check_turn(pair: Pair, unit: Unit, config: AdapterConfig, layout: str) -> None:
    """Refuse what an old PEFT saved of a stack, whose factors have input and output changed over."""
    module = unit.module
    if layout != STACKED or not pair.place.expert or module.transposed:
        return
    turned = (pair.inputs, pair.outputs) == (module.outputs, module.inputs)
    version = _version(config.peft_version)
    if turned and (module.inputs != module.outputs or (config.parameters and version < _PEFT_TURNED)):
        raise Unfit(
            f"{unit.place} has its input and output dimension changed over, as PEFT before 0.19 saves adapted "
            "parameters: train or convert it with a newer one",
            field="target_parameters",
        )


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"(\d{1,4})\.(\d{1,4})", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _column_order(pairs: Sequence[Pair], adapter: Adapter) -> str:
    """Which of the stacked layouts this is, from what the files say. Raises InvalidRequest where they don't."""
    said = {text for text in (adapter.config.expert_order, adapter.metadata.get("expert_order", "")) if text}
    if len(said) > 1 or not said <= {"fastest", "block"}:
        raise InvalidRequest(
            f"{adapter.what}: expert_order is said to be {shown(', '.join(said))}", field="expert_order"
        )
    if said:
        return STACKED if said == {"fastest"} else BLOCKWISE
    if adapter.config.parameters or all(pair.rank == 1 for pair in pairs if pair.place.expert):
        # what target_parameters stands for is PEFT's to say, and at rank 1 there is one order only
        return STACKED
    raise InvalidRequest(
        f"{adapter.what} stacks experts in B's columns, by expert or by rank, and doesn't say which: name the "
        'parameters in target_parameters if PEFT saved it, or set expert_order to "fastest" or "block"',
        field="expert_order",
    )


def _extra(names: list[str], adapter: Adapter, shape: BaseShape) -> InvalidRequest | Unfit:
    """Why the first of the tensors that nothing accounts for is refused."""
    name = names[0]
    for mark, reason in _FEATURES.items():
        if mark in name:
            return Unfit(f"{adapter.what} holds {_listed(names)}: {reason}", field=shown(name))
    known = {
        stem
        for place, module in shape.places()
        for layout in (PER_EXPERT, STACKED, OUTER)
        if _can_hold(place.module, layout)
        for stem in tensor_stems(
            place, _path(place.module, module, layout), module.experts, layout=layout, prefix=adapter.prefix
        )
    }
    stem, _, ending = name.rpartition(".lora_")
    if ending in ("A.weight", "B.weight") and stem.replace(".base_layer", "") in known:
        return InvalidRequest(
            f"{adapter.what} holds {_listed(names)}, which the configuration does not ask for", field=name
        )
    return Unfit(
        f"{adapter.what} holds {_listed(names)}: no such module in the base "
        f"({shape.architecture}, {shape.layers} layers)",
        field=shown(name),
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {shown(names[0])}{more}"
