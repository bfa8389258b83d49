"""What a base's adaptable modules are called: our names, the paths of their weights, and names in a revision file."""

from __future__ import annotations

import re
from typing import NamedTuple

# our name: path inside a layer. The order is the order inside a revision file.
DENSE_PATHS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
PATHS = DENSE_PATHS
MODULE_OF_PATH = {path: module for module, path in PATHS.items()}
ORDER = {module: place for place, module in enumerate(PATHS)}
MAX_LAYERS = 4096

# what the names of a PEFT adapter's tensors begin with: the usual one, and that of an adapter of the bare model
PEFT_PREFIX = "base_model.model.model."
PEFT_PREFIXES = (PEFT_PREFIX, "base_model.model.")

_TENSOR_RE = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.([a-z][a-z_.]{0,62})\.([AB])", re.ASCII)


class Place(NamedTuple):
    """Where an adapter acts: a layer's number and our name of one of its modules."""

    layer: int
    module: str

    def __str__(self) -> str:
        return f"layers.{self.layer}.{self.module}"

    @property
    def order(self) -> tuple[int, int]:
        """Sorts places as a revision file holds them: by layer, then by module."""
        return (self.layer, ORDER[self.module])


def tensor_name(place: Place, factor: str) -> str:
    """A tensor's name in a revision file; ``factor`` is A or B."""
    return f"{place}.{factor}"


def parse_tensor_name(name: str) -> tuple[Place, str] | None:
    """(place, factor) of a revision file's tensor; None for a name that is none."""
    match = _TENSOR_RE.fullmatch(name) if len(name) <= 96 else None
    if match is None or match[2] not in PATHS:
        return None
    return Place(int(match[1]), match[2]), match[3]
