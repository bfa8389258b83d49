"""What a checkpoint says of itself, beside the files of the ranks. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from blake3 import blake3

from catalog.names import shown
from packer.folder import confined, read_bounded
from wire.outcomes import ArtifactUnavailable, InvalidRequest, Unfit
from wire.trainer import PolicySpec

NAME = "checkpoint.json"
FORMAT = 1
_MAX_BYTES = 512 << 20
_CHUNK_BYTES = 8 << 20


class StateManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``files`` are the ranks' files with their blake3 digests.

    ``base`` is the fingerprint of the base that it was trained over, where that was known. ``number`` and ``answer``
    are of the last change that the state holds, where the trainer itself took it: what it answered to it, encoded.
    """

    format: int = FORMAT
    spec: PolicySpec
    step: int
    optimizer: bool
    gradients: bool
    files: dict[str, str]
    number: int = 0
    answer: bytes = b""
    base: str = ""

    def check_base(self, fingerprint: str) -> None:
        """Raises Unfit where it was trained over another base than ``fingerprint``'s, as far as both are known."""
        if self.base and fingerprint and self.base != fingerprint:
            raise Unfit(
                f"the checkpoint is of the base with fingerprint {self.base}, and {fingerprint} is trained here",
                field="base",
            )

    def check_for(self, spec: PolicySpec, *, optimizer: bool) -> None:
        """Raises Unfit unless a policy of ``spec`` can take this state, InvalidRequest where it lacks the moments."""
        for name in ("rank", "alpha", "targets"):
            mine, other = getattr(spec, name), getattr(self.spec, name)
            if mine != other:
                raise Unfit(f"the checkpoint has {name} {other}, the policy has {mine}", field=name)
        if optimizer and not self.optimizer:
            raise InvalidRequest("the checkpoint was saved without its optimizer", field="optimizer")


def write_manifest(folder: Path, manifest: StateManifest) -> None:
    """Write and fsync it, and the folder."""
    with (folder / NAME).open("wb") as file:
        file.write(msgspec.json.encode(manifest))
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> StateManifest:
    """Raises InvalidRequest."""
    raw = read_bounded(confined(folder, NAME), _MAX_BYTES)
    try:
        manifest = msgspec.json.decode(raw, type=StateManifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{NAME} is malformed: {shown(str(error))}", field=NAME) from None
    if manifest.format != FORMAT:
        raise InvalidRequest(f"the checkpoint has format {manifest.format}; known is {FORMAT}", field="format")
    return manifest


def verify_files(folder: Path, manifest: StateManifest) -> None:
    """Read every file. Raises ArtifactUnavailable where one is not what was written."""
    for name, digest in manifest.files.items():
        if blake3(max_threads=blake3.AUTO).update_mmap(confined(folder, name)).hexdigest() != digest:
            raise ArtifactUnavailable(f"{name} of the checkpoint is not what was written: its digest differs")
