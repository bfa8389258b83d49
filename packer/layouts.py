"""How adapter files lay out experts, and what each layout calls its tensors.

| layout | tensors of a layer's experts, below their container (``mlp.experts``) |
| --- | --- |
| per expert | two dimensions each: ``3.gate_proj.lora_A.weight`` is (rank, in), ``.lora_B.weight`` (out, rank) |
| stacked | what PEFT saves for ``target_parameters`` and vLLM calls 3D: ``base_layer`` holds the fused gate_up, the container itself down, or the only one of them that is adapted; A is (experts * rank, in), expert after expert; B is (out, rank * experts), in whose columns **the expert varies fastest** |
| stacked, by block | the same, but B's columns are one expert's ranks after another's: some tools write this |
| outer | three dimensions as in a revision file: ``w1`` (gate), ``w3`` (up), ``w2`` (down); a leading 1 where all experts share a factor, as the shared-outer format does for A of w1 and w3 and for B of w2 |

The two stacked ones can't be told apart by their tensors: they are equal at rank 1 and silently wrong above.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Collection, Iterable

from packer.modules import Place

PER_EXPERT = ""
STACKED = "stacked"
BLOCKWISE = "stacked-by-block"
OUTER = "outer"
# each in a person's words
LAYOUTS = {
    PER_EXPERT: "each has tensors of its own",
    STACKED: "stacked; in B's columns the expert varies fastest (the order of PEFT and vLLM)",
    BLOCKWISE: "stacked; B's columns are one expert's after another's",
    OUTER: "stacked in three dimensions, experts first",
}
OUTER_NAMES = {"experts.gate": "w1", "experts.up": "w3", "experts.down": "w2"}
# the modules that a stacked adapter can hold
FUSED = ("experts.gate_up", "experts.down")


def container_of(path: str) -> str:
    """What holds all experts, from the path of one of their modules or of a fused parameter."""
    return path.partition(".{}")[0] if "{}" in path else path.rpartition(".")[0]


def layout_of(tensors: Iterable[str]) -> str:
    """The experts' layout, from the names of the tensors. Column orders of stacked ones are not told apart here."""
    for name in tensors:
        container, found, rest = name.partition(".experts.")
        if not found or not container:
            continue
        if rest.startswith(("lora_", "base_layer.lora_")):
            return STACKED
        if rest.startswith(("w1.", "w2.", "w3.")):
            return OUTER
        return PER_EXPERT
    return PER_EXPERT


def tensor_stems(
    place: Place, path: str, experts: int, *, layout: str, prefix: str, beside: Collection[str] = ()
) -> list[str]:
    """The names of ``place``'s tensors without ``.lora_A.weight``: one, or with the per-expert layout ``experts``.

    ``beside`` are the modules of the layer that the adapter holds, which PEFT's nesting depends on.
    """
    base = f"{prefix}layers.{place.layer}."
    if not place.expert:
        return [f"{base}{path}"]
    if layout == PER_EXPERT:
        before, _, after = f"{base}{path}".partition("{}")
        return [f"{before}{expert}{after}" for expert in range(experts)]
    container = base + container_of(path)
    if layout == OUTER:
        return [f"{container}.{OUTER_NAMES[place.module]}"]
    inner = place.module == "experts.gate_up" and "experts.down" in beside
    return [f"{container}.base_layer" if inner else container]
