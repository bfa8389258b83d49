"""Whether the store has what the catalog names: every artifact, of its size, and of its digest."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import msgspec

from wire.outcomes import RoostError

from .artifacts import ArtifactStore
from .environment import Environment
from .layout import digest_key
from .snapshot import Snapshot

_PAGE = 1000


class _Problem(NamedTuple):
    sentence: str
    missing: bool = False


class ArtifactCheck(msgspec.Struct, frozen=True):
    """How many artifacts there are, and how many were read.

    ``failed`` are damaged or not in the store; ``missing`` are the latter, among them what an import with --external
    declared and nobody brought yet. ``problems`` are sentences, those about damage first.
    """

    artifacts: int
    verified: int
    failed: int
    missing: int
    problems: tuple[str, ...]


def check_artifacts(
    environment: Environment,
    store: ArtifactStore,
    *,
    sample: float = 1.0,
    seed: int = 0,
    most: int | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> ArtifactCheck:
    """Look for all artifacts, and read the share ``sample`` (0 to 1) of them. The registrar may run meanwhile.

    At most ``most`` problems are told, where that is given.
    """
    chance = random.Random(seed)  # noqa: S311 - which files are read, nothing secret
    artifacts = verified = failed = missing = 0
    damaged_told: list[str] = []
    missing_told: list[str] = []
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
                missing += problem.missing
                told = missing_told if problem.missing else damaged_told
                told += [problem.sentence] if most is None or len(told) < most else []
            progress(artifacts, total)
        after = digest_key(page[-1][0])
    return ArtifactCheck(artifacts, verified, failed, missing, tuple([*damaged_told, *missing_told][:most]))


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


def _problem(store: ArtifactStore, digest: str, size: int, read: bool) -> _Problem | None:
    try:
        found = store.size(digest)
        if found is None:
            return _Problem(f"artifact {digest} is not in the store", missing=True)
        if found != size:
            return _Problem(f"artifact {digest} has {found} bytes in the store, not {size}")
        if read:
            store.verify(digest)
    except RoostError as error:
        return _Problem(error.message)
    return None
