"""The revision file of a policy: its header, and where each tensor lies, from the specification alone. No torch."""

from __future__ import annotations

import functools
from typing import NamedTuple

from packer.modules import tensor_name
from packer.revision import Content, make_content
from packer.safetensors_header import ITEM_BYTES
from wire.trainer import PolicySpec

from .hf_config import BaseConfig
from .layout import pairs_of, revision_alpha

_MAX_KNOWN = 64


class RevisionLayout(NamedTuple):
    """``offsets`` says where each tensor begins; the file is filled to ``ends[i]`` when layers 0 to i are written.

    Both in bytes from the file's start.
    """

    content: Content
    header: bytes
    offsets: dict[str, int]
    ends: list[int]


@functools.lru_cache(_MAX_KNOWN)
def revision_layout(spec: PolicySpec, base: BaseConfig, dtype: str) -> RevisionLayout:
    """How the policy's revision file is laid out; ``dtype`` is BF16 or F32."""
    paths = {name: module.path for layer in base.shape.modules for name, module in layer.items()}
    content = make_content(
        pairs_of(spec, base),
        dtype,
        rank=spec.rank,
        alpha=revision_alpha(spec.alpha),
        rslora=False,
        paths={name: path for name, path in paths.items() if name in spec.targets},
    )
    header = content.header()
    position = len(header)
    offsets: dict[str, int] = {}
    ends = [position] * base.layers
    for pair in content.pairs:
        for factor, elements in zip("AB", pair.elements, strict=True):
            offsets[tensor_name(pair.place, factor)] = position
            position += elements * ITEM_BYTES[dtype]
        ends[pair.place.layer] = position
    for layer in range(1, base.layers):
        ends[layer] = max(ends[layer], ends[layer - 1])
    return RevisionLayout(content, header, offsets, ends)
