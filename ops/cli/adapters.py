"""A folder of PEFT adapters as a source of a bulk import: each subfolder is packed and becomes a policy's revision."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from catalog.artifacts import ArtifactStore
from catalog.bulk import Item
from catalog.names import check_policy
from packer.peft import pack_peft
from packer.shape import BaseShape
from wire.events import ArtifactFacts, Provenance
from wire.outcomes import InvalidRequest, RoostError, error_for
from wire.registrar import ImportedRevision

_CONFIG = "adapter_config.json"
_READ_BYTES = 1 << 20


def adapter_folders(folder: Path) -> list[Path]:
    """The subfolders that hold an adapter, by name. Raises InvalidRequest where there are none."""
    found = sorted(child for child in folder.iterdir() if (child / _CONFIG).is_file())
    if not found:
        raise InvalidRequest(f"no folder in {folder} holds an {_CONFIG}", field="folder")
    return found


def without_adapter(folder: Path) -> int:
    """How many subfolders an import of ``folder`` leaves out."""
    return sum(child.is_dir() and not (child / _CONFIG).is_file() for child in folder.iterdir())


def read_folder(folders: list[Path], tenant: str, base: str, shape: BaseShape, store: ArtifactStore) -> Iterator[Item]:
    """Pack the adapters, and store those that the store has not; policies are named as their folders.

    Raises the RoostError that one is refused with, which names its folder.
    """
    for folder in folders:
        try:
            policy = check_policy(f"{tenant}/{folder.name}")
            facts = _stored(folder, shape, store)
        except RoostError as error:
            message = f"{folder}: {error.message}"
            raise error_for(error.outcome, message, field=error.field, retry_after_s=error.retry_after_s) from None
        revision = ImportedRevision(
            policy=policy, base=base, artifact=facts, provenance=Provenance(source=folder.name, format="peft")
        )
        yield Item(revision, folder.name)


def _stored(folder: Path, shape: BaseShape, store: ArtifactStore) -> ArtifactFacts:
    with tempfile.TemporaryFile(prefix="roost-import-") as packed:
        facts = pack_peft(folder, shape, packed)
        if store.size(facts.digest) is None:
            _store(packed, facts.digest, store)
    return facts


def _store(packed: BinaryIO, digest: str, store: ArtifactStore) -> None:
    packed.seek(0)
    with store.writer() as writer:
        while data := packed.read(_READ_BYTES):
            writer.write(data)
        writer.commit(digest)
