"""An adapter as a person would want to see it."""

from __future__ import annotations

import msgspec

from packer.inspect import Inspection, ModuleSummary

from .output import size_of, tell, tell_json, tell_table

_COLUMNS = ("MODULE", "LAYERS", "EXPERTS", "IN", "OUT", "RANK", "ALPHA", "SCALE", "PARAMETERS")


def show_inspection(name: str, seen: Inspection, *, as_json: bool) -> None:
    """What the adapter is, module by module, and whether it would be taken."""
    if as_json:
        tell_json(msgspec.to_builtins(seen))
        return
    tell((name, "bold"), f"  {seen.kind}, {size_of(seen.bytes)}, {seen.tensors:,} tensors, {', '.join(seen.dtypes)}")
    if seen.trained_on:
        tell(f"trained on {seen.trained_on}")
    if seen.layout:
        tell(f"experts: {seen.layout}")
    if seen.modules:
        tell_table(_COLUMNS, [_row(module) for module in seen.modules], empty="")
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
    shared = f", one {' and '.join(module.shared)}" if module.shared else ""
    numbers = (module.inputs, module.outputs, module.rank)
    scaled = (f"{module.alpha:g}", f"{module.scale:.4g}", f"{module.parameters:,}")
    return (module.module, module.layers, experts + shared, *map(str, numbers), *scaled)
