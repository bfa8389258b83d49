"""Whether the store has what the catalog names: every artifact, of its size, and of its digest."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from wire.outcomes import RoostError

from .artifacts import ArtifactStore
from .environment import Environment

_SHOWN = 20


class ArtifactCheck(msgspec.Struct, frozen=True):
    """How many artifacts there are and how many were read; ``problems`` are sentences, the first few of them."""

    artifacts: int
    verified: int
    failed: int
    problems: tuple[str, ...]


def check_artifacts(
    environment: Environment,
    store: ArtifactStore,
    *,
    sample: float = 1.0,
    seed: int = 0,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> ArtifactCheck:
    """Look for all artifacts, and read the share ``sample`` (0 to 1) of them. The registrar may run meanwhile."""
    chance = random.Random(seed)  # noqa: S311 - which files are read, nothing secret
    artifacts = verified = failed = 0
    problems: list[str] = []
    with environment.begin() as txn:
        table = environment.tables.artifacts
        total = txn.stat(table.handle)["entries"]
        for _, record in table.scan(txn):
            artifacts += 1
            read = chance.random() < sample
            problem = _problem(store, record.facts.digest, record.facts.size, read)
            verified += read and problem is None
            if problem is not None:
                failed += 1
                problems += [problem] if len(problems) < _SHOWN else []
            progress(artifacts, total)
    return ArtifactCheck(artifacts, verified, failed, tuple(problems))


def _problem(store: ArtifactStore, digest: str, size: int, read: bool) -> str | None:
    try:
        found = store.size(digest)
        if found is None:
            return f"artifact {digest} is not in the store"
        if found != size:
            return f"artifact {digest} has {found} bytes in the store, not {size}"
        if read:
            store.verify(digest)
    except RoostError as error:
        return error.message
    return None
