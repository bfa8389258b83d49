"""The revision file of a policy: its header, and where each tensor lies, from the specification alone. No torch."""

from __future__ import annotations

from packer.modules import tensor_name
from packer.revision import Content, make_content
from packer.safetensors_header import ITEM_BYTES
from wire.trainer import PolicySpec

from .hf_config import BaseConfig
from .layout import pairs_of, revision_alpha


def content_of(spec: PolicySpec, base: BaseConfig, dtype: str) -> Content:
    """What the header of the policy's revision says; ``dtype`` is BF16 or F32."""
    paths = {name: module.path for layer in base.shape.modules for name, module in layer.items()}
    return make_content(
        pairs_of(spec, base),
        dtype,
        rank=spec.rank,
        alpha=revision_alpha(spec.alpha),
        rslora=False,
        paths={name: path for name, path in paths.items() if name in spec.targets},
    )


def tensor_offsets(spec: PolicySpec, base: BaseConfig, dtype: str) -> dict[str, int]:
    """Where each tensor begins, in bytes from the file's start."""
    content = content_of(spec, base, dtype)
    position = len(content.header())
    offsets = {}
    for pair in content.pairs:
        for factor, elements in zip("AB", pair.elements, strict=True):
            offsets[tensor_name(pair.place, factor)] = position
            position += elements * ITEM_BYTES[dtype]
    return offsets


def layer_ends(spec: PolicySpec, base: BaseConfig, dtype: str) -> list[int]:
    """How far the file is filled when layers 0 to i are written, in bytes, for each layer i."""
    content = content_of(spec, base, dtype)
    position = len(content.header())
    ends = [position] * base.layers
    for pair in content.pairs:
        position += sum(pair.elements) * ITEM_BYTES[dtype]
        ends[pair.place.layer] = position
    for layer in range(1, base.layers):
        ends[layer] = max(ends[layer], ends[layer - 1])
    return ends
