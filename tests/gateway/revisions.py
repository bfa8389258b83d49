"""Revision files for the tiny base of the mesh, made without an adapter folder."""

from __future__ import annotations

import numpy as np
from blake3 import blake3

from packer.modules import Place
from packer.revision import Pair, make_content


def revision_bytes(seed: int = 0, *, rank: int = 4, inputs: int = 64, value: float | None = None) -> bytes:
    """A revision of q and v in both layers; ``value`` fills the tensors where it is given."""
    pairs = [
        Pair(Place(layer, module), rank, 8, inputs, outputs)
        for layer in range(2)
        for module, outputs in (("q", 64), ("v", 32))
    ]
    content = make_content(pairs, "F32", rank=rank, alpha=8, rslora=False)
    count = sum(sum(pair.elements) for pair in pairs)
    numbers = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    if value is not None:
        numbers[:] = value
    return content.header() + numbers.tobytes()


def digest_of(content: bytes) -> str:
    return blake3(content).hexdigest()
