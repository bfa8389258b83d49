"""An adapter as a person would want to see it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from packer.inspect import Inspection, ModuleSummary

from .output import size_of, tell, tell_json, tell_table

_COLUMNS = ("MODULE", "LAYERS", "EXPERTS", "IN", "OUT", "RANK", "ALPHA", "SCALE", "PARAMETERS")


def show_inspection(name: str, seen: Inspection, *, as_json: bool) -> None:
    """What the adapter is, module by module, and whether it would be taken."""
    if as_json:
        tell_json(msgspec.to_builtins(seen))
        return
    held = (size_of(seen.bytes), f"{seen.tensors:,} tensors", *seen.dtypes) if seen.tensors else ()
    tell((name, "bold"), "  ", ", ".join((seen.kind, *held)))
    if seen.job:
        tell(f"split over ranks: {seen.job}")
    if seen.trained_on:
        tell(f"trained on {seen.trained_on}")
    if seen.layout:
        tell(f"experts: {seen.layout}")
    if seen.modules:
        tell_table(_COLUMNS, _aligned([_row(module) for module in seen.modules]), empty="")
    if any(module.alternating for module in seen.modules):
        tell("experts.gate_up: its outputs are gate and up in turn, as the base has them")
    if seen.further:
        tell(f"layers that predict further tokens (MTP): {seen.further}")
    if seen.facts is not None:
        rule = "rsLoRA, alpha / sqrt(rank)" if seen.rslora else "alpha / rank"
        tell(f"{seen.facts.parameters:,} parameters, scaled by {rule}")
        tell(f"as a revision: {size_of(seen.facts.size)}, {seen.facts.tensors:,} tensors, digest {seen.facts.digest}")
    against = seen.compared or "itself alone: no --base-config was given"
    if seen.refusal:
        tell(("Would be refused", "red"), f" (checked against {against}): {seen.refusal}")
    else:
        tell(("Would be taken", "green"), f" (checked against {against})")


def _row(module: ModuleSummary) -> tuple[str, ...]:
    experts = f"{module.experts:,}" if module.experts else ""
    shared = f", {' and '.join(module.shared)} shared" if module.shared else ""
    numbers = (module.inputs, module.outputs, module.rank)
    scaled = (f"{module.alpha:g}", f"{module.scale:.4g}", f"{module.parameters:,}")
    return (module.module, module.layers, experts + shared, *map(str, numbers), *scaled)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[list[str]]:
    """The rows with their numbers flush right, below headings that stay where they are."""
    widths = [max(len(heading), *map(len, column)) for heading, *column in zip(_COLUMNS, *rows, strict=True)]
    first = _COLUMNS.index("IN")
    return [
        [
            cell.rjust(width) if place >= first else cell
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
