"""A folder of PEFT adapters as a source of a bulk import: each subfolder is packed and becomes a policy's revision."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from catalog.artifacts import ArtifactStore
from catalog.bulk import Item
from catalog.names import check_policy
from packer.peft import pack_peft
from packer.shape import BaseShape
from wire.events import Provenance
from wire.outcomes import InvalidRequest
from wire.registrar import ImportedRevision

_CONFIG = "adapter_config.json"
_READ_BYTES = 1 << 20


def adapter_folders(folder: Path) -> list[Path]:
    """The subfolders that hold an adapter, by name. Raises InvalidRequest where there are none."""
    found = sorted(child for child in folder.iterdir() if (child / _CONFIG).is_file())
    if not found:
        raise InvalidRequest(f"no folder in {folder} holds an {_CONFIG}", field="folder")
    return found


def read_folder(
    folders: list[Path], tenant: str, base: str, shape: BaseShape, store: ArtifactStore, *, after: str
) -> Iterator[Item]:
    """Pack and store the adapters whose folder's name comes after ``after``; policies are named as their folders."""
    for folder in folders:
        if folder.name <= after:
            continue
        policy = check_policy(f"{tenant}/{folder.name}")
        with tempfile.TemporaryFile(prefix="roost-import-") as packed, store.writer() as writer:
            facts = pack_peft(folder, shape, packed)
            packed.seek(0)
            while data := packed.read(_READ_BYTES):
                writer.write(data)
            writer.commit(facts.digest)
        revision = ImportedRevision(
            policy=policy, base=base, artifact=facts, provenance=Provenance(source=folder.name, format="peft")
        )
        yield Item(revision, folder.name)
