"""A catalog of a given size, filled by applying events as the registrar does, without waiting for the disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from itertools import count, islice
from pathlib import Path

from catalog.apply import append_all
from catalog.collector import collecting_rarely
from catalog.environment import Environment
from catalog.snapshot import Snapshot
from wire.events import AnyEvent, ArtifactFacts, BaseAdded, Event, PolicyCreated, Provenance, RevisionPublished

BASE = "tiny"
FINGERPRINT = "b" * 64
_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
_EVENTS_A_TRANSACTION = 10_000
_MAP_BYTES = 1 << 40
_BEGUN_MS = 1_760_000_000_000


def policy_name(number: int) -> str:
    """Tenants of a thousand policies each, in the order of numbers."""
    return f"tenant-{number // 1000:05d}/policy-{number:08d}"


def facts(number: int, revision: int) -> ArtifactFacts:
    """Those of an adapter of its own: rank 8, all modules of a small base."""
    digest = hashlib.blake2b(b"%d@%d" % (number, revision), digest_size=32).hexdigest()
    return ArtifactFacts(digest, 5_242_880 + number % 1000, 8, _TARGETS, "bf16", 448, 2_621_440)


def fill(folder: Path, policies: int, revisions: int) -> Path:
    """The catalog's folder."""
    with (
        collecting_rarely(),
        closing(Environment.create(folder, map_bytes=_MAP_BYTES, durable=False)) as environment,
    ):
        events = _events(policies, revisions)
        while batch := list(islice(events, _EVENTS_A_TRANSACTION)):
            with environment.begin(write=True) as txn, Snapshot.writing(txn, environment.tables) as view:
                append_all(view, batch)
        environment.sync()
    return folder


def _events(policies: int, revisions: int) -> Iterator[Event]:
    for seq, body in zip(count(1), _bodies(policies, revisions), strict=False):
        yield Event(seq, _BEGUN_MS + seq, "admin", body)


def _bodies(policies: int, revisions: int) -> Iterator[AnyEvent]:
    yield BaseAdded(BASE, FINGERPRINT, "/models/tiny", b"{}")
    for number in range(policies):
        name = policy_name(number)
        yield PolicyCreated(name, BASE)
        for revision in range(1, revisions + 1):
            yield RevisionPublished(name, revision, facts(number, revision), Provenance("loadtest", "peft"))
