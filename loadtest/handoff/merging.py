"""Merges adapters into their base's weights: the stock way to serve what was trained, done by a process that is warm.

``python -m loadtest.handoff.merging BASE DEVICE`` keeps the base's weights on the device, says ``ready``, and for each
line of JSON (``revision``, a revision file; ``out``, a folder) writes a checkpoint and says ``done``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from packer.revision import RevisionFile
from packer.shape import BaseShape

_TORCH = {"BF16": torch.bfloat16, "F32": torch.float32}


class MergeJob(msgspec.Struct, frozen=True):
    """One merge."""

    revision: str
    out: str


def merge(base: Path, weights: dict[str, Any], file: RevisionFile, out: Path) -> None:
    """Write ``base`` with W + scale * B @ A, computed in fp32, in the place of each adapted module's W."""
    shape = BaseShape.from_config((base / "config.json").read_bytes())
    merged = dict(weights)
    for pair in file.pairs:
        module = shape.modules[pair.place.layer][pair.place.module]
        name = f"model.layers.{pair.place.layer}.{module.path}.weight"
        stem, device = f"layers.{pair.place.layer}.{pair.place.module}", weights[name].device
        a, b = (
            _tensor(file, f"{stem}.{factor}", part).to(device) for factor, part in zip("AB", pair.shapes, strict=True)
        )
        added = torch.addmm(weights[name].float(), b, a, alpha=file.scale(pair))
        merged[name] = added.to(weights[name].dtype)
    out.mkdir(parents=True)
    for other in base.iterdir():
        if other.suffix != ".safetensors" and other.is_file():
            shutil.copy(other, out / other.name)
    save_file(merged, out / "model.safetensors", metadata={"format": "pt"})


def _tensor(file: RevisionFile, name: str, shape: tuple[int, ...]) -> Any:
    raw = torch.from_numpy(np.frombuffer(file.tensor(name), np.uint8).copy())
    return raw.view(_TORCH[file.dtype]).view(shape).float()


def main(base: Path, device: str) -> None:
    weights: dict[str, Any] = {}
    for file in sorted(base.glob("*.safetensors")):
        weights |= load_file(file, device=device)
    print("ready", flush=True)
    for line in sys.stdin:
        job = msgspec.json.decode(line, type=MergeJob)
        merge(base, weights, RevisionFile.open(Path(job.revision)), Path(job.out))
        print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
