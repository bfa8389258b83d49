"""An adapter folder of any format that we read, into a revision file."""

from __future__ import annotations

from pathlib import Path

from packer.copying import Progress, Sink
from packer.megatron import is_sharded, pack_megatron
from packer.peft import pack_peft
from packer.shape import BaseShape
from wire.events import ArtifactFacts


def pack_adapter(folder: Path, shape: BaseShape, out: Sink, *, progress: Progress | None = None) -> ArtifactFacts:
    """Write the revision file of the adapter in ``folder``, trained on a base of ``shape``, to ``out``.

    Raises InvalidRequest or Unfit that name the tensor or the field: what was written until then is worth nothing.
    """
    pack = pack_megatron if is_sharded(folder) else pack_peft
    return pack(folder, shape, out, progress=progress)
