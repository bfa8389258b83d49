"""What a base's adaptable modules are called: our names, the paths of their weights, and names in a revision file.

Experts are stacked. ``layers.{i}.experts.gate.A`` is (experts, rank, in) and ``.B`` is (experts, out, rank), expert
by expert as the base numbers them; a factor that all experts share has 1 in place of experts (the shared-outer format
shares A of gate and up, and B of down). An adapter of a fused parameter has one pair ``experts.gate_up`` instead of
``experts.gate`` and ``experts.up``: one A, and a B whose rows are the parameter's, gate's and up's half after half or
alternating as ``ModuleShape.interleaved`` says. Every other module has a two-dimensional pair.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

# our name: path inside a layer, with {} for an expert's number. The order is the order inside a revision file.
DENSE_PATHS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
# multi-head latent attention, and the indexer of DeepSeek's sparse attention
MLA_PATHS = {
    "q_a": "self_attn.q_a_proj",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_b": "self_attn.kv_b_proj",
}
INDEXER_PATHS = {
    "indexer.q": "self_attn.indexer.wq_b",
    "indexer.k": "self_attn.indexer.wk",
    "indexer.weights": "self_attn.indexer.weights_proj",
}
# what joins hidden state and embedding in a layer that predicts further tokens (MTP)
MTP_PATHS = {"eh": "eh_proj"}
ROUTER_PATHS = {"router": "mlp.gate"}
SHARED_PATHS = {
    "shared.gate": "mlp.shared_experts.gate_proj",
    "shared.up": "mlp.shared_experts.up_proj",
    "shared.down": "mlp.shared_experts.down_proj",
}
EXPERT_PATHS = {
    "experts.gate": "mlp.experts.{}.gate_proj",
    "experts.gate_up": "mlp.experts.gate_up_proj",
    "experts.up": "mlp.experts.{}.up_proj",
    "experts.down": "mlp.experts.{}.down_proj",
}
PATHS = {
    **MTP_PATHS, **{name: DENSE_PATHS[name] for name in "qkv"}, **MLA_PATHS, **INDEXER_PATHS,
    **{name: DENSE_PATHS[name] for name in ("o", "gate", "up", "down")}, **ROUTER_PATHS, **SHARED_PATHS, **EXPERT_PATHS,
}  # fmt: skip
ORDER = {module: place for place, module in enumerate(PATHS)}
MAX_LAYERS = 4096
MAX_EXPERTS = 4096

# what the names of a PEFT adapter's tensors begin with: the usual one, and that of an adapter of the bare model
PEFT_PREFIX = "base_model.model.model."
PEFT_PREFIXES = (PEFT_PREFIX, "base_model.model.")

_TENSOR_RE = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.([a-z][a-z_.]{0,62})\.([AB])", re.ASCII)
_PATH_RE = re.compile(r"[a-z][a-z0-9_]*(\.([a-z][a-z0-9_]*|\{\}))*", re.ASCII)
_MAX_PATH = 120


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

    @property
    def expert(self) -> bool:
        """Whether this is a stack of experts."""
        return self.module in EXPERT_PATHS


def is_path(module: str, path: str) -> bool:
    """Whether ``path`` may be where a base keeps ``module``: one {} where there is a weight for each expert."""
    numbered = 1 if "{}" in PATHS[module] else 0
    return len(path) <= _MAX_PATH and path.count("{}") == numbered and _PATH_RE.fullmatch(path) is not None


# the same names come with every revision of a base
@lru_cache(1 << 14)
def tensor_name(place: Place, factor: str) -> str:
    """A tensor's name in a revision file; ``factor`` is A or B."""
    return f"{place}.{factor}"


@lru_cache(1 << 14)
def parse_tensor_name(name: str) -> tuple[Place, str] | None:
    """(place, factor) of a revision file's tensor; None for a name that is none."""
    match = _TENSOR_RE.fullmatch(name) if len(name) <= 96 else None
    if match is None or match[2] not in PATHS:
        return None
    return Place(int(match[1]), match[2]), match[3]
