"""The smallest base that an adapter fits, from the adapter alone: for one that is looked at without its base."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from packer.adapter_config import AdapterConfig
from packer.architectures import ModuleShape
from packer.layouts import FUSED, OUTER_NAMES, PER_EXPERT, STACKED, layout_of
from packer.manifest import Manifest
from packer.modules import EXPERT_PATHS, MAX_EXPERTS, MAX_LAYERS, ORDER, PATHS
from packer.revision import Pair
from packer.safetensors_header import TensorSpec
from packer.shape import BaseShape

_IMPLIED = "as the adapter implies"
_ELSEWHERE = ("model.embed_tokens", "lm_head")
_NAME_RE = re.compile(r"layers\.(\d{1,4})\.([a-z_0-9.]{1,120})\.lora_A\.weight", re.ASCII)
_EXPERT_RE = re.compile(r"\.experts\.(\d{1,4})\.", re.ASCII)
# where architectures differ from the usual paths
_MODULE_OF_PATH = {
    **{path: module for module, path in PATHS.items()},
    "block_sparse_moe.gate": "router",
    "mlp.router": "router",
    "block_sparse_moe.experts.{}.w1": "experts.gate",
    "block_sparse_moe.experts.{}.w3": "experts.up",
    "block_sparse_moe.experts.{}.w2": "experts.down",
}
_OUTER_MODULES = {name: module for module, name in OUTER_NAMES.items()}

Layers = dict[int, dict[str, ModuleShape]]


def shape_of_pairs(pairs: Sequence[Pair], manifest: Manifest) -> BaseShape:
    """What a revision file's pairs need."""
    layers: Layers = {}
    for pair in pairs:
        module = ModuleShape(manifest.path(pair.place.module), pair.inputs, pair.outputs, max(pair.experts))
        layers.setdefault(pair.place.layer, {})[pair.place.module] = module
    return _base(layers)


def shape_of_tensors(config: AdapterConfig, tensors: Mapping[str, TensorSpec], prefix: str) -> BaseShape:
    """What the tensors of a PEFT file need, by their names and shapes."""
    layout = layout_of(tensors)
    layers: Layers = {}
    for name, spec in tensors.items():
        match = _NAME_RE.fullmatch(name.removeprefix(prefix))
        other = tensors.get(f"{name.removesuffix('A.weight')}B.weight")
        if match is None or other is None or not int(match[1]) < MAX_LAYERS or len(spec.shape) != len(other.shape):
            continue
        found = layers.setdefault(int(match[1]), {})
        if ".experts" not in match[2] or layout == PER_EXPERT:
            _add_plain(found, match[2], spec, other)
        elif layout == STACKED:
            _add_stacked(found, match[2], spec, other, config)
        else:
            _add_outer(found, match[2], spec, other)
    return _base(layers)


def _add_plain(found: dict[str, ModuleShape], path: str, a: TensorSpec, b: TensorSpec) -> None:
    expert = _EXPERT_RE.search(path)
    if expert is not None:
        path = _EXPERT_RE.sub(".experts.{}.", path, count=1)
    module = _MODULE_OF_PATH.get(path)
    if module is None or len(a.shape) != 2 or (module in EXPERT_PATHS) != (expert is not None):
        return
    before = found.get(module)
    count = 0 if expert is None else max(int(expert[1]) + 1, before.experts if before else 0)
    if count <= MAX_EXPERTS:
        found[module] = ModuleShape(path, a.shape[1], b.shape[0], count)


def _add_stacked(found: dict[str, ModuleShape], path: str, a: TensorSpec, b: TensorSpec, config: AdapterConfig) -> None:
    if len(a.shape) != 2 or path not in ("mlp.experts", "mlp.experts.base_layer"):
        return
    fused = path.endswith("base_layer") or not any(name.endswith("down_proj") for name in config.parameters)
    module = FUSED[0] if fused and (path.endswith("base_layer") or config.parameters) else FUSED[1]
    experts = a.shape[0] // config.rank
    if 0 < experts <= MAX_EXPERTS:
        found[module] = ModuleShape(PATHS[module], a.shape[1], b.shape[0], experts)


def _add_outer(found: dict[str, ModuleShape], path: str, a: TensorSpec, b: TensorSpec) -> None:
    module = _OUTER_MODULES.get(path.rpartition(".")[2])
    if module is not None and len(a.shape) == 3 and max(a.shape[0], b.shape[0]) <= MAX_EXPERTS:
        found[module] = ModuleShape(PATHS[module], a.shape[2], b.shape[1], max(a.shape[0], b.shape[0]))


def _base(layers: Layers) -> BaseShape:
    ordered: list[dict[str, ModuleShape]] = [
        dict(sorted(layers.get(layer, {}).items(), key=lambda entry: ORDER[entry[0]]))
        for layer in range(max(layers, default=-1) + 1)
    ]
    return BaseShape(_IMPLIED, tuple(ordered), _ELSEWHERE)
