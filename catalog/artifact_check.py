"""Whether the store has what the catalog names: every artifact, of its size, and of its digest."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice

import msgspec

from wire.outcomes import RoostError

from .artifacts import ArtifactStore
from .environment import Environment
from .layout import digest_key
from .snapshot import Snapshot

_SHOWN = 20
_PAGE = 1000


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
    total, after = _count(environment), b""
    while page := _page(environment, after):
        for digest, size in page:
            artifacts += 1
            read = chance.random() < sample
            problem = _problem(store, digest, size, read)
            verified += read and problem is None
            # one that was removed since its page was read is nobody's loss
            if problem is not None and _is_named(environment, digest):
                failed += 1
                problems += [problem] if len(problems) < _SHOWN else []
            progress(artifacts, total)
        after = digest_key(page[-1][0])
    return ArtifactCheck(artifacts, verified, failed, tuple(problems))


def _count(environment: Environment) -> int:
    with environment.begin() as txn:
        entries: int = txn.stat(environment.tables.artifacts.handle)["entries"]
        return entries


def _page(environment: Environment, after: bytes) -> list[tuple[str, int]]:
    """The next digests and sizes. In a transaction of its own: one that lasts keeps the writer from reusing pages."""
    with environment.begin() as txn:
        scan = environment.tables.artifacts.scan(txn, after=after or None)
        return [(record.facts.digest, record.facts.size) for _, record in islice(scan, _PAGE)]


def _is_named(environment: Environment, digest: str) -> bool:
    with environment.begin() as txn:
        return Snapshot(txn, environment.tables).artifact(digest) is not None


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
