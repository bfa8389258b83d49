"""The ``adapter_config.json`` of an unpacked adapter: exactly its modules, and what is computed with them."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from packer.layouts import BLOCKWISE, OUTER, OUTER_NAMES, PER_EXPERT, container_of
from packer.manifest import Manifest
from packer.revision import Content


def unpacked_config(content: Content, prefix: str, base_model: str, **computing: Any) -> bytes:
    """What PEFT would have written. ``computing`` are the fields of rank, alpha and scaling."""
    body = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        **_targets(content, prefix),
        "use_dora": False,
        **computing,
    }
    return msgspec.json.format(msgspec.json.encode(body, order="sorted"), indent=2) + b"\n"


def module_pattern(manifest: Manifest, key: str, prefix: str) -> str:
    """What a PEFT configuration calls a manifest's key: a module's path, or one module's full name."""
    layers, _, rest = key.partition(".")
    if layers != "layers":
        return _path_pattern(manifest, key)
    layer, _, module = rest.partition(".")
    return f"{_model(prefix)}layers.{layer}.{_path_pattern(manifest, module)}"


def _model(prefix: str) -> str:
    return prefix.removeprefix("base_model.model.")


def _path_pattern(manifest: Manifest, module: str) -> str:
    path = manifest.path(module)
    if manifest.layout == OUTER and module in OUTER_NAMES:
        return f"{container_of(path)}.{OUTER_NAMES[module]}"
    if manifest.layout == PER_EXPERT:
        return path.replace("{}", r"\d+")
    return path.replace(".{}", "")


def _targets(content: Content, prefix: str) -> dict[str, Any]:
    """Exactly the adapted modules: names and layers where every such layer has all of them, else in full.

    The layers are always said, since the base may have more of them than the adapter.
    """
    manifest = content.manifest
    if any(pair.place.expert for pair in content.pairs):
        return _expert_targets(content, prefix)
    layers = sorted({pair.place.layer for pair in content.pairs})
    modules = manifest.targets
    if len(content.pairs) == len(layers) * len(modules) and len({*map(_last, map(manifest.path, modules))}) == len(
        modules
    ):
        names = [_last(manifest.path(module)) for module in modules]
        return {"target_modules": names, "layers_to_transform": layers, "layers_pattern": "layers"}
    return {"target_modules": [module_pattern(manifest, str(pair.place), prefix) for pair in content.pairs]}


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _expert_targets(content: Content, prefix: str) -> dict[str, Any]:
    """One expression for all modules; what PEFT stacks are parameters, which it can't name by one."""
    manifest = content.manifest
    places = [pair.place for pair in content.pairs]
    fused = manifest.layout not in (PER_EXPERT, OUTER)
    by_modules: dict[tuple[str, ...], list[int]] = {}
    in_layer: dict[int, list[str]] = {}
    for place in places:
        if not (fused and place.expert and manifest.layout != BLOCKWISE):
            in_layer.setdefault(place.layer, []).append(place.module)
    for layer, modules in in_layer.items():
        by_modules.setdefault(tuple(modules), []).append(layer)
    parts = []
    for group, layers in by_modules.items():
        paths = "|".join(_escaped(_path_pattern(manifest, module)) for module in group)
        parts.append(f"({'|'.join(map(str, layers))})\\.({paths})")
    targets: dict[str, Any] = {
        "target_modules": f"{re.escape(_model(prefix))}layers\\.({'|'.join(parts)})" if parts else []
    }
    if manifest.layout == BLOCKWISE:
        return {**targets, "expert_order": "block"}
    if fused:
        names = [module_pattern(manifest, str(place), prefix) for place in places if place.expert]
        return {**targets, "target_parameters": names}
    return targets


def _escaped(path: str) -> str:
    return path.replace(".", r"\.")
