"""A revision file that all ranks write together, layers in order, and that can be read behind them. No torch."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from blake3 import blake3

from packer.folder import map_file
from packer.revision import DTYPE_NAMES
from wire.events import ArtifactFacts
from wire.outcomes import ArtifactUnavailable, InvalidRequest, StorageFull
from wire.trainer import AnswerOfRank, AskOfRank, ExportLayers, PolicySpec

from .hf_config import BaseConfig
from .revision import revision_layout

# about how much is written before the next bytes count as final
_RANGE_BYTES = 4 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)

Ask = Callable[[AskOfRank], Awaitable[Sequence[AnswerOfRank]]]


async def export_revision(
    ask: Ask,
    spec: PolicySpec,
    base: BaseConfig,
    path: Path,
    dtype: str,
    progress: Callable[[int, int], None] | None,
) -> ArtifactFacts:
    """Write the file at ``path``; its digest is made while it is written. See ``TrainerBackend.export_revision``."""
    if dtype not in DTYPE_NAMES:
        raise InvalidRequest(f"a revision can't have the dtype {dtype!r}: BF16 or F32", field="dtype")
    content, header, _, ends = revision_layout(spec, base, dtype)
    size = ends[-1]
    _reserve(path, header, size)
    view = map_file(path)
    digest = blake3(max_threads=blake3.AUTO)
    hashing = asyncio.ensure_future(asyncio.to_thread(digest.update, header))
    done = len(header)
    if progress is not None:
        progress(done, size)
    try:
        for first, last in _ranges(ends, done):
            await ask(ExportLayers(policy=spec.policy, path=str(path), dtype=dtype, first=first, last=last))
            await hashing
            hashing = asyncio.ensure_future(asyncio.to_thread(digest.update, view[done : ends[last - 1]]))
            done = ends[last - 1]
            if progress is not None:
                progress(done, size)
    finally:
        await hashing
    return content.facts(digest.hexdigest(), size)


def _ranges(ends: list[int], start: int) -> list[tuple[int, int]]:
    """Layers in ranges of about ``_RANGE_BYTES``, as (first, last), the last exclusive."""
    ranges = []
    first = 0
    for layer, end in enumerate(ends):
        if end - start >= _RANGE_BYTES or layer == len(ends) - 1:
            ranges.append((first, layer + 1))
            first, start = layer + 1, end
    return ranges


def _reserve(path: Path, header: bytes, size: int) -> None:
    """Make the file in its full size, anew: who reads one that ranks died under keeps what is there. Raises
    StorageFull, ArtifactUnavailable."""
    try:
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            file.write(header)
    except OSError as error:
        kind = StorageFull if error.errno in _FULL else ArtifactUnavailable
        raise kind(f"cannot write {path}: {error.strerror}") from error
